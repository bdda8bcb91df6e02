"""The block pool, the hashes that name blocks, and what shares them."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.hashing import BlockHasher
from engine_core.request import Request
from executor.sampling_params import SamplingParams
from executor.step import Int32s, LoRARequest

TOKENS = np.arange(64, dtype=np.int32)


class ReferencePool:
    """The same promises with one queue: blank blocks go back to its front, named ones to its end."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = deque(range(1, num_blocks))
        self.names: dict[int, bytes] = {}
        self.found: dict[bytes, list[int]] = {}
        self.holders = [0] * num_blocks

    def allocate(self, count: int) -> list[int]:
        taken = [self.queue.popleft() for _ in range(count)]
        for block in taken:
            self.holders[block] = 1
            if name := self.names.pop(block, None):
                self.found[name].remove(block)
        return taken

    def name(self, blocks: list[int], names: list[bytes]) -> None:
        for block, name in zip(blocks, names, strict=True):
            self.names[block] = name
            self.found.setdefault(name, []).append(block)

    def find(self, names: list[bytes]) -> list[int]:
        hits = []
        for name in names:
            if not self.found.get(name):
                break
            hits.append(self.found[name][0])
        return hits

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.holders[block]:
                self.queue.remove(block)
            self.holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        blank, named = [], []
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                (named if block in self.names else blank).append(block)
        self.queue.extendleft(reversed(blank))
        self.queue.extend(named)

    def forget_all(self) -> bool:
        if len(self.queue) != len(self.holders) - 1:
            return False
        self.names.clear()
        self.found.clear()
        return True


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_given_out_as_by_one_queue(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([3, 10, 40])
    pool, reference = BlockPool(num_blocks), ReferencePool(num_blocks)
    tables: dict[str, tuple[list[int], int]] = {}  # request: its blocks, and how many have names
    contents = [bytes([i]) for i in range(6)]
    for i in range(600):
        action = rng.random()
        if action < 0.45:
            names = rng.sample(contents, rng.randint(0, 3))
            hits = pool.find(names, len(names))
            assert hits == reference.find(names)
            free = pool.num_free - pool.num_unheld(hits)
            count = rng.randint(0, 4)
            if count <= free:
                pool.hold(hits)
                reference.hold(hits)
                fresh = pool.allocate(count, f"r{i}")
                assert fresh == reference.allocate(count)
                tables[f"r{i}"] = (hits + fresh, len(hits))
        elif action < 0.6 and tables:
            who = rng.choice(list(tables))
            blocks, named = tables[who]
            if named < len(blocks):
                names = [rng.choice(contents)]
                pool.name(blocks[named : named + 1], names)
                reference.name(blocks[named : named + 1], names)
                tables[who] = (blocks, named + 1)
        elif action < 0.98 and tables:
            blocks, named = tables.pop(rng.choice(list(tables)))
            pool.release(blocks, named)
            reference.release(blocks)
        else:
            assert pool.forget_all() == reference.forget_all()
        assert pool.num_free == len(reference.queue)
        assert pool.check((who, blocks, named) for who, (blocks, named) in tables.items()) == []


def test_the_null_block_is_never_given_out() -> None:
    assert sorted(BlockPool(5).allocate(4, "r")) == [1, 2, 3, 4]


def test_usage_counts_held_blocks() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    blocks = pool.allocate(2, "r")
    assert pool.usage == 0.5
    pool.name(blocks, [b"a", b"b"])
    pool.release(blocks, 2)
    assert pool.usage == 0.0


def test_forgetting_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(1, "r")
    pool.name(blocks, [b"a"])
    assert not pool.forget_all()
    assert pool.find([b"a"], 1) == blocks
    pool.release(blocks, 1)
    assert pool.forget_all()
    assert pool.find([b"a"], 1) == []


class TestCheckReports:
    def test_a_leaked_block_with_its_last_owner(self) -> None:
        pool = BlockPool(5)
        pool.allocate(1, "request-7")
        assert pool.check([]) == ["block 1 leaked: neither free nor held, last owner request-7"]

    def test_two_holders_of_a_block_that_nobody_may_share(self) -> None:
        pool = BlockPool(5)
        blocks = pool.allocate(1, "a")
        assert pool.check([("a", blocks, 0), ("b", blocks, 0)]) == [
            "block 1 has no name but several holders: a, b"
        ]

    def test_a_block_that_is_free_and_held(self) -> None:
        pool = BlockPool(3)
        blocks = pool.allocate(1, "a")
        pool.release(blocks, 0)
        assert pool.check([("a", blocks, 0)]) == ["block 1 is free but held by a"]

    def test_a_name_that_the_holder_does_not_know_of(self) -> None:
        pool = BlockPool(3)
        blocks = pool.allocate(1, "a")
        pool.name(blocks, [b"x"])
        assert pool.check([("a", blocks, 0)]) == ["block 1 has a name, contrary to the table of a"]

    def test_a_wrong_count_of_holders(self) -> None:
        pool = BlockPool(3)
        blocks = pool.allocate(1, "a")
        pool.name(blocks, [b"x"])
        pool.hold(blocks)
        assert pool.check([("a", blocks, 1)]) == ["block 1 counts 2 holders, but has 1: a"]


def names(
    hasher: BlockHasher, tokens: Int32s, cache_salt: str | None = None, lora: LoRARequest | None = None
) -> list[bytes]:
    return hasher.extend(hasher.start(cache_salt, lora), tokens.tobytes())


@pytest.mark.parametrize("algo", ["sha256", "xxhash"])
class TestNames:
    def test_equal_prefixes_have_equal_names(self, algo: str) -> None:
        hasher = BlockHasher(16, algo)
        all_ = names(hasher, TOKENS)
        assert len(set(all_)) == 4
        assert names(hasher, TOKENS[:32]) == all_[:2]

    def test_it_does_not_matter_in_which_parts_the_blocks_come(self, algo: str) -> None:
        hasher = BlockHasher(16, algo)
        prefix = hasher.start(None, None)
        first = hasher.extend(prefix, TOKENS[:48].tobytes())
        assert first + hasher.extend(prefix, TOKENS[48:].tobytes()) == names(hasher, TOKENS)

    def test_a_difference_changes_all_names_behind_it(self, algo: str) -> None:
        hasher = BlockHasher(16, algo)
        other = TOKENS.copy()
        other[20] = 999
        a, b = names(hasher, TOKENS), names(hasher, other)
        assert a[0] == b[0]
        assert not set(a[1:]) & set(b[1:])

    def test_salts_and_adapters_share_nothing(self, algo: str) -> None:
        hasher = BlockHasher(16, algo)
        lora = LoRARequest("name", 1, "/path")
        kinds: list[tuple[str | None, LoRARequest | None]] = [
            (None, None),
            ("salt", None),
            ("other", None),
            (None, lora),
            ("salt", lora),
            (None, LoRARequest("name", 1, "/other")),  # the name points to another adapter now
            (None, LoRARequest("other", 1, "/path")),
        ]
        found = [name for salt, adapter in kinds for name in names(hasher, TOKENS, salt, adapter)]
        assert len(set(found)) == len(found)

    def test_an_adapters_number_does_not_matter(self, algo: str) -> None:
        hasher = BlockHasher(16, algo)
        one, two = LoRARequest("n", 1, "/p"), LoRARequest("n", 2, "/p")
        assert names(hasher, TOKENS, None, one) == names(hasher, TOKENS, None, two)

    def test_an_empty_salt_is_none(self, algo: str) -> None:
        hasher = BlockHasher(16, algo)
        assert names(hasher, TOKENS, "") == names(hasher, TOKENS)

    def test_a_request_goes_on_where_its_names_end(self, algo: str) -> None:
        """Also if it lost the hash to go on from."""
        hasher = BlockHasher(16, algo)
        for forget in (False, True):
            request = Request("r", TOKENS[:40], SamplingParams(), cache_salt="s", block_hasher=hasher)
            request.output += TOKENS[40:].tobytes()
            if forget:
                request.prefix_hash = None
            request.extend_hashes(hasher)
            assert request.block_hashes == names(hasher, TOKENS, "s")


def test_sha256_names_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    expected = "e9a6eef9"
    assert names(BlockHasher(16), TOKENS)[0].hex()[:8] == expected


def test_xxhash_names_start_from_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert names(BlockHasher(16, "xxhash"), TOKENS) != names(BlockHasher(16, "xxhash"), TOKENS)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert names(BlockHasher(16, "xxhash"), TOKENS) == names(BlockHasher(16, "xxhash"), TOKENS)
