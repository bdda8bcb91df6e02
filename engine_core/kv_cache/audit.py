"""Whether the accounts of a block pool add up: free + cached + held = total, and every holder is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine_core.kv_cache.block_pool import BlockPool

Table = tuple[str, Sequence[int], int]  # a live request's id, its blocks, and how many of them have names
Counts = npt.NDArray[np.intp]


def audit(pool: BlockPool, tables: Iterable[Table]) -> list[str]:
    """What is wrong, a sentence each; empty if nothing is. Takes about 0.1 us for each block of the pool."""
    return list(_problems(pool, list(tables)))


def _problems(pool: BlockPool, tables: list[Table]) -> Iterator[str]:
    size = pool.num_blocks

    def counts(blocks: Iterable[int]) -> Counts:
        return np.bincount(np.fromiter(blocks, np.intp), minlength=size)

    def holders(block: int) -> str:
        return ", ".join(request_id for request_id, blocks, _ in tables if block in blocks)

    queue = pool.cached_blocks()
    blank, cached = counts(pool._blank), counts(queue)
    held = counts(block for _, blocks, _ in tables for block in blocks)
    held_named = counts(block for _, blocks, num_named in tables for block in blocks[:num_named])
    free = blank + cached
    named = np.fromiter((name is not None for name in pool._name), bool, size)
    others = np.array(pool._others)

    if held[0] or free[0]:
        yield "the null block was given out"
    for block in _where(free > 1):
        yield f"block {block} is free {free[block]} times"
    for block in _where((held > 0) & (free > 0)):
        yield f"block {block} is free but held by {holders(block)}"
    for block in _where((held == 0) & (free == 0)):
        if block:
            yield f"block {block} leaked: neither free nor held, last owner {pool._owner[block]}"
    for block in _where((held > 0) & (named != (held_named > 0))):
        state = "has a name" if named[block] else "has no name"
        yield f"block {block} {state}, contrary to the table of {holders(block)}"
    for block in _where((held > 1) & ~named):
        yield f"block {block} has no name but several holders: {holders(block)}"
    for block in _where(others != np.maximum(held - 1, 0)):
        if not (held[block] > 1 and not named[block]):
            who = f"{held[block]}: {holders(block)}" if held[block] else "none"
            yield f"block {block} counts {1 + others[block]} holders, but has {who}"
    for block in _where((blank > 0) & named):
        yield f"block {block} is blank but has a name"
    for block in _where((cached > 0) & ~named):
        yield f"block {block} is cached but has no name"

    if len(queue) != pool._num_cached or not np.array_equal(np.frombuffer(pool._is_cached, np.uint8), cached):
        yield f"{len(queue)} blocks are cached, counted as {pool._num_cached}, or marked otherwise"
    if np.count_nonzero(others) != pool._num_shared:
        yield f"{np.count_nonzero(others)} blocks are shared, counted as {pool._num_shared}"
    found = 0
    names = pool._name
    for name, twins in pool._by_hash.items():
        for block in (twins,) if isinstance(twins, int) else twins:
            found += 1
            if names[block] != name:
                yield f"block {block} is found under a name that is not its own"
    if found != np.count_nonzero(named):
        yield f"{np.count_nonzero(named)} blocks have names, {found} can be found"


def _where(condition: npt.NDArray[np.bool_]) -> list[int]:
    blocks: list[int] = condition.nonzero()[0].tolist()
    return blocks
