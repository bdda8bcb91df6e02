"""Who may write which KV block: the mock's proof that no block is used by two requests at once.

A live request holds its first blocks as a reader (a prefix hit) and the rest as their one owner. Many may
read a block, also while its owner lives; a block gets a new owner only when nobody holds it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor.step import Int32s

NO_ONE = -1


class BlockLedgerError(Exception):
    """A block was given to a request that must not have it."""


class BlockLedger:
    """Owner and readers of each of `num_blocks` blocks; block 0 is the null block and never holds data."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        self._num_blocks = num_blocks
        self._owner = np.full(num_blocks, NO_ONE, np.int32)  # slot
        self._readers = np.zeros(num_blocks, np.int32)
        self._owned: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._read: list[Int32s] = [np.empty(0, np.int32) for _ in range(max_num_seqs)]

    def admit(self, slot: int, read: Int32s, owned: Int32s) -> None:
        """A request enters with `read` blocks of a prefix hit, followed by `owned` ones."""
        ids = np.concatenate((read, owned))
        self._check_ids(ids)
        if len(set(ids.tolist())) != len(ids):
            raise BlockLedgerError(f"slot {slot} is given a block twice: {ids.tolist()}")
        self._check_unheld(owned)
        self._readers[read] += 1
        self._read[slot] = read
        self._owner[owned] = slot
        self._owned[slot] = owned.tolist()

    def extend(self, slots: Int32s, block_ids: Int32s) -> None:
        """Live requests get more blocks, as parallel columns."""
        self._check_ids(block_ids)
        ids = block_ids.tolist()
        if len(set(ids)) != len(ids):
            raise BlockLedgerError(f"a block is given out twice in one step: {ids}")
        self._check_unheld(block_ids)
        self._owner[block_ids] = slots
        for slot, block_id in zip(slots.tolist(), ids, strict=True):
            self._owned[slot].append(block_id)

    def release(self, slots: Int32s) -> None:
        """The requests in these slots left."""
        for slot in slots.tolist():
            self._owner[self._owned[slot]] = NO_ONE
            self._readers[self._read[slot]] -= 1
            self._owned[slot] = []
            self._read[slot] = self._read[slot][:0]

    def held(self) -> npt.NDArray[np.bool_]:
        """Which blocks a live request holds. (num_blocks,)"""
        held: npt.NDArray[np.bool_] = (self._owner != NO_ONE) | (self._readers > 0)
        return held

    def _check_ids(self, ids: Int32s) -> None:
        if len(ids) and (int(ids.min()) < 1 or int(ids.max()) >= self._num_blocks):
            wrong = ids[(ids < 1) | (ids >= self._num_blocks)]
            raise BlockLedgerError(f"block ids {wrong.tolist()} are not in 1..{self._num_blocks - 1}")

    def _check_unheld(self, ids: Int32s) -> None:
        taken = (self._owner[ids] != NO_ONE) | (self._readers[ids] > 0)
        if taken.any():
            block_id = int(ids[taken.argmax()])
            owner, readers = int(self._owner[block_id]), int(self._readers[block_id])
            holder = f"slot {owner}" if owner != NO_ONE else f"{readers} readers"
            raise BlockLedgerError(f"block {block_id} is given out to be written while {holder} holds it")
