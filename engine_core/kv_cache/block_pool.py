"""Which KV blocks are free, held or cached.

Every block except the null block 0 is in exactly one of three states:

    blank    in `_blank`: free, holds nothing worth keeping
    cached   in `_cached`: free, but its content has a name and can be taken over by a hit
    held     in the block table of one request, or of several when its content has a name

The order in which free blocks are given out is vLLM 0.33's: blank blocks last in first out, then cached
blocks least recently freed first. Blank blocks always precede cached ones there, so two containers stand
for its one linked list, and a run of blank blocks is taken or given back in one slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine_core.kv_cache.audit import Table, audit

if TYPE_CHECKING:
    from engine_core.kv_events import KVEventRecorder


class BlockPool:
    """Blocks 1 .. num_blocks - 1. Not thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))  # a stack; its end is given out next
        # Oldest first. A block that is taken over by a hit stays in it as a ghost, since removing it would
        # cost a search; where a block occurs several times, its ghosts are in front.
        self._cached: deque[int] = deque()
        self._ghosts = [0] * num_blocks
        self._num_cached = 0  # without ghosts
        self._is_cached = bytearray(num_blocks)
        self._name: list[bytes | None] = [None] * num_blocks
        self._others = [0] * num_blocks  # holders of a block beyond the first
        self._num_shared = 0  # blocks that have such
        # Equal content computed twice has two blocks of one name; the one named first is found first.
        self._by_hash: dict[bytes, int | dict[int, None]] = {}
        self._owner: list[str | None] = [None] * num_blocks  # request that a block was last allocated for
        self.events: KVEventRecorder | None = None  # hears of contents that are gone

    @property
    def num_free(self) -> int:
        return len(self._blank) + self._num_cached

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        usable = self.num_blocks - 1
        return 1.0 - self.num_free / usable if usable else 0.0

    @property
    def num_cached(self) -> int:
        """Contents that a prefix can hit, in blocks that are free or held."""
        return len(self._by_hash)

    def names(self) -> list[bytes]:
        """Of those contents."""
        return list(self._by_hash)

    def has_any(self, names: Iterable[bytes]) -> bool:
        """Whether a block holds the content of one of these names."""
        return not self._by_hash.keys().isdisjoint(names)

    def find(self, names: Sequence[bytes], limit: int) -> list[int]:
        """Blocks that hold the content of the first of `names`, without a gap, at most `limit`."""
        found: list[int] = []
        get = self._by_hash.get
        for name in names[:limit]:
            block = get(name)
            if block is None:
                break
            found.append(block if isinstance(block, int) else next(iter(block)))
        return found

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these named blocks are free: taking them over uses up free blocks."""
        return sum(map(self._is_cached.__getitem__, blocks))

    def hold(self, blocks: Iterable[int]) -> None:
        """One more request holds these named blocks."""
        is_cached, ghosts, others = self._is_cached, self._ghosts, self._others
        for block in blocks:
            if is_cached[block]:
                is_cached[block] = 0
                ghosts[block] += 1
                self._num_cached -= 1
            else:
                self._num_shared += not others[block]
                others[block] += 1
        if len(self._cached) > 2 * self._num_cached + 1024:
            self._lay_ghosts()

    def _lay_ghosts(self) -> None:
        """Rid the queue of what is in it for nothing. Happens once for as many ghosts as it is long."""
        self._cached = deque(self.cached_blocks())
        self._ghosts = [0] * self.num_blocks

    def cached_blocks(self) -> list[int]:
        """Free blocks with a name, in the order in which they are given out."""
        if len(self._cached) == self._num_cached:
            return list(self._cached)
        ghosts, kept = self._ghosts.copy(), []
        for block in self._cached:
            if ghosts[block]:
                ghosts[block] -= 1
            else:
                kept.append(block)
        return kept

    def _pop_oldest(self) -> int:
        cached, ghosts = self._cached, self._ghosts
        block = cached.popleft()
        while ghosts[block]:
            ghosts[block] -= 1
            block = cached.popleft()
        self._is_cached[block] = 0
        self._num_cached -= 1
        return block

    def allocate(self, count: int, owner: str) -> list[int]:
        """Take `count` free blocks; the caller has checked `num_free`. Cached content given out is lost."""
        blank = self._blank
        if count == 1 and blank:
            block = blank.pop()
            self._owner[block] = owner
            return [block]
        taken = blank[: -count - 1 : -1]
        del blank[len(blank) - len(taken) :]
        while len(taken) < count:
            block = self._pop_oldest()
            self._forget(block)
            taken.append(block)
        owners = self._owner
        for block in taken:
            owners[block] = owner
        return taken

    def name(self, blocks: list[int], names: list[bytes]) -> None:
        """The content of these blocks, each held by one request, is complete and may be shared from now
        on.
        """
        by_hash, name_of = self._by_hash, self._name
        for block, name in zip(blocks, names, strict=True):
            name_of[block] = name
        # Mostly there is no block of the name yet: what comes back are the blocks themselves.
        found = list(map(by_hash.setdefault, names, blocks))
        if found != blocks:
            for block, name, twin in zip(blocks, names, found, strict=True):
                if twin != block:
                    self._add_twin(name, block)

    def _add_twin(self, name: bytes, block: int) -> None:
        twins = self._by_hash[name]
        if isinstance(twins, int):
            self._by_hash[name] = {twins: None, block: None}
        else:
            twins[block] = None

    def unname(self, blocks: Iterable[int]) -> None:
        """These blocks, each held by one request, were named too early: nobody may find them."""
        for block in blocks:
            assert not self._others[block], f"block {block} has {1 + self._others[block]} holders"
            self._forget(block)

    def release(self, blocks: Sequence[int], num_named: int) -> None:
        """A request lets go of its block table, of which the first `num_named` blocks have names.

        Its tail is given out first: a prefix is worth more to others than what follows it.
        """
        self._blank.extend(blocks[num_named:])
        if not num_named:
            return
        named = blocks[num_named - 1 :: -1]
        if self._num_shared:
            named = self._leave_to_others(named)
        self._cached.extend(named)
        self._num_cached += len(named)
        is_cached = self._is_cached
        for block in named:
            is_cached[block] = 1

    def _leave_to_others(self, blocks: Sequence[int]) -> list[int]:
        """One holder less for each block; returns those that have none left."""
        others, left = self._others, []
        for block in blocks:
            count = others[block]
            if not count:
                left.append(block)
            else:
                others[block] = count - 1
                self._num_shared -= count == 1
        return left

    def forget_all(self) -> bool:
        """Drop all cached content. False, and nothing is done, while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._lay_ghosts()
        self._blank = [*reversed(self._cached), *self._blank]  # the order of giving out stays
        self._cached.clear()
        self._num_cached = 0
        self._is_cached = bytearray(self.num_blocks)
        self._by_hash.clear()
        self._name = [None] * self.num_blocks
        if self.events is not None:
            self.events.cleared()
        return True

    def _forget(self, block: int) -> None:
        name = self._name[block]
        assert name is not None
        self._name[block] = None
        twins = self._by_hash[name]
        if not isinstance(twins, int):
            del twins[block]
            if twins:
                return
        del self._by_hash[name]
        if self.events is not None:
            self.events.removed(name)

    def check(self, tables: Iterable[Table]) -> list[str]:
        """What is wrong with the accounts, a sentence each; empty if nothing is.

        `tables` gives every live request's id, block table and number of named blocks in it.
        """
        return audit(self, tables)
