"""Sums and gathers between the ranks of one host, through shared memory.

Whoever starts the ranks makes a `CollectiveSegment` and hands its descriptors down; each rank opens them as a
`Collective`. All ranks must make the same calls in the same order. A call that cannot end raises: the death
of a rank is noticed at once, and every wait has a deadline whose error names the ranks that are missing.

Layout, in bytes. A line is 128 bytes, every word a native u64 with one writer:

    offset          field         written by   read by     meaning 0               MAGIC         creator
    ranks       layout and its version 8               RANKS         creator      ranks       their number 16
    CHUNK         creator      ranks       bytes of a buffer 128 + 128 r     PUBLISHED     rank r       the
    others  number of chunks it has put down since the start 136 + 128 r     PARKED        rank r       the
    others  0: awake; else the number of the sleep it announces 144 + 128 r     PID           rank r       the
    others  its process; 0 before it attached 152 + 128 r     START         rank r       the others  when that
    process started, in ticks since boot 160 + 128 r     TAG           rank r       the others  two words by
    parity: what chunk is part of which call page boundary   buffers       rank r       the others  two by
    parity for each rank: chunks by number

A rank puts chunk s into its buffer s mod 2, publishes s, and waits until all have published s. Then it reads
the others' buffers, and goes on with s + 1 in its other buffer. That is safe: whoever has published s + 1 has
finished reading chunk s, and nobody puts down s + 2 before all have published s + 1. So a chunk costs one
wait, and no word is ever reset.

Every rank adds in the order of the ranks, so all get the same bits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transport.clock import SYSTEM_CLOCK, Clock
from transport.errors import CallMismatch, RankDied, TransportError, TransportTimeout
from transport.processes import ProcessIdentity, own_identity, pidfd_of
from transport.ring import anonymous_file
from transport.waiting import TOTAL_STORE_ORDER, Sleeper, SpinCondition, WaitPolicy, memory_fence

Array = npt.NDArray[Any]

MAX_RANKS = 64
DEFAULT_CHUNK_BYTES = (
    1 << 20
)  # fewer, longer pieces: each costs a wait, and with more ranks than cores a turn

_MAGIC = int.from_bytes(b"eccoll\x00\x01", "little")
_MAGIC_WORD, _RANKS, _CHUNK = 0, 1, 2  # indices of words
_LINES, _LINE = 16, 16  # PUBLISHED, ... of rank r at _LINES + _LINE * r + 0, ...
_PUBLISHED, _PARKED, _PID, _START, _TAG = range(5)
_REDUCE, _GATHER = 1, 2


def _data_offset(world_size: int) -> int:
    return (8 * (_LINES + _LINE * world_size) + 4095) & -4096


class CollectiveSegment:
    """What the ranks share. It has no name, and goes with the last process that has it open."""

    def __init__(self, world_size: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        """`chunk_bytes`: longer arrays are passed on in pieces of this size; a multiple of 64.

        Raises TransportError if there is not enough memory.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"there can be 1 to {MAX_RANKS} ranks, not {world_size}")
        if chunk_bytes < 64 or chunk_bytes % 64:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, not a positive multiple of 64")
        size = _data_offset(world_size) + 2 * world_size * chunk_bytes
        # The segment, then the doorbell of each rank.
        self.fds = [anonymous_file(size, "engine-core-collective")]
        with mmap.mmap(self.fds[0], 4096) as head, memoryview(head) as view, view.cast("Q") as words:
            words[_RANKS] = world_size
            words[_CHUNK] = chunk_bytes
            words[_MAGIC_WORD] = _MAGIC
        self.fds += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(world_size)]

    def close(self) -> None:
        """Close the descriptors. Idempotent; ranks that have opened them go on."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Collective:
    """One rank's end. For one thread, except `cancel`.

    `fds` are the segment's; the object takes them over. `timeout_s` is the deadline of each wait for the
    others.
    """

    def __init__(
        self,
        fds: Sequence[int],
        rank: int,
        *,
        timeout_s: float,
        wait: WaitPolicy | None = None,
        name: str = "collective",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Raises TransportError if the descriptors are not those of a segment."""
        segment, *self._doorbells = fds
        with mmap.mmap(segment, 4096, prot=mmap.PROT_READ) as head, memoryview(head) as view:
            magic, world_size, chunk_bytes = view.cast("Q")[:3].tolist()
        if magic != _MAGIC or len(self._doorbells) != world_size:
            raise TransportError(
                "the descriptors are not a collective segment of this version of the transport"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank} among {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self._timeout_s = timeout_s
        self._monotonic = clock.monotonic
        self._chunk_bytes = chunk_bytes
        data = _data_offset(world_size)
        self._map = mmap.mmap(
            segment, data + 2 * world_size * chunk_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        os.close(segment)
        self._view = memoryview(self._map)
        self._words = self._view.cast("Q")
        buffers = np.frombuffer(self._map, np.uint8, 2 * world_size * chunk_bytes, data)
        self._buffers = buffers.reshape(world_size, 2, chunk_bytes)
        self._line = _LINES + _LINE * rank
        self._lines = [_LINES + _LINE * r for r in range(world_size)]
        self._others = [r for r in range(world_size) if r != rank]
        self._sequence = 0
        self._naps = 0
        self._rung = [0] * world_size  # the sleep of each rank that this one last rang for
        self._pidfds: dict[int, int] = {}  # descriptor -> rank
        self._failure: TransportError | None = None
        # Called with the rank that a call is about to sleep for, and with -1 after it.
        self.on_sleep: Callable[[int], None] | None = None
        self._awaited = -1
        self._sleeper = Sleeper(self._doorbells[rank], self._raise_dead, queue=name)
        self._condition = SpinCondition(
            self._words,
            self._sleeper,
            wait or WaitPolicy(),
            park=self._park,
            unpark=self._unpark,
            crowded=world_size > len(os.sched_getaffinity(0)),
            clock=clock,
        )
        identity = own_identity()
        self._words[self._line + _START] = identity.start_ticks
        self._words[self._line + _PID] = identity.pid
        self._ring_sleepers()

    def all_reduce(self, array: Array) -> None:
        """Replace `array` by its sum over the ranks, which all get the same. Any shape and number type,
        C-contiguous.

        Raises RankDied, TransportTimeout, CallMismatch, Cancelled; after any of them the object is of no use.
        """
        if not array.flags.c_contiguous:
            raise ValueError("the array is not C-contiguous")
        if self.world_size == 1:
            return
        flat = array.reshape(-1)
        step = self._chunk_bytes // array.itemsize
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            buffers = self._exchange(_REDUCE, array, start, part)
            np.add(buffers[0], buffers[1], out=part)
            for other in buffers[2:]:
                part += other

    def all_gather(self, array: Array) -> Array:
        """The ranks' arrays side by side along the last axis: (..., n) -> (..., world_size * n).

        All have the same shape and type. Raises as `all_reduce` does.
        """
        *leading, columns = array.shape
        result: Array = np.empty((*leading, self.world_size * columns), array.dtype)
        if not array.size:
            return result
        if self.world_size == 1:
            result[...] = array
            return result
        lines = array.reshape(-1, columns)
        by_rank = result.reshape(len(lines), self.world_size, columns)
        step = self._chunk_bytes // array.itemsize
        high, wide = max(1, step // columns), min(step, columns)
        for top in range(0, len(lines), high):
            for left in range(0, columns, wide):
                part = lines[top : top + high, left : left + wide]
                buffers = self._exchange(_GATHER, array, top * columns + left, part)
                for r, buffer in enumerate(buffers):
                    by_rank[top : top + high, r, left : left + wide] = buffer
        return result

    def cancel(self) -> None:
        """From any thread: a call that waits raises Cancelled, and so does every later one."""
        self._sleeper.cancel()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if not self._doorbells:
            return
        for fd in (*self._doorbells, *self._pidfds):
            os.close(fd)
        self._doorbells = []
        self._sleeper.close()
        self._words.release()
        self._view.release()
        del self._buffers
        with contextlib.suppress(BufferError):  # a traceback may still hold a view of a buffer
            self._map.close()
        self._failure = TransportError(f"this end of {self.name!r} was closed")

    def _exchange(self, kind: int, array: Array, offset: int, part: Array) -> list[Array]:
        """Put `part` down and wait for the others' parts. Views of all ranks' buffers, shaped like it; good
        until
        the next chunk but one is put down."""
        if self._failure is not None:
            raise self._failure
        if not self._pidfds:
            self._await_attached()
        self._sequence += 1
        sequence, words = self._sequence, self._words
        parity = sequence & 1
        views = [
            self._buffers[r, parity, : part.nbytes].view(part.dtype).reshape(part.shape)
            for r in range(self.world_size)
        ]
        views[self.rank][...] = part
        tag = kind << 62 | ord(array.dtype.char) << 54 | (array.nbytes ^ offset << 20) & ((1 << 54) - 1)
        words[self._line + _TAG + parity] = tag
        if not TOTAL_STORE_ORDER:
            memory_fence()
        words[self._line + _PUBLISHED] = sequence
        self._ring_sleepers()
        self._await(_PUBLISHED, sequence)
        if not TOTAL_STORE_ORDER:
            memory_fence()
        for r in self._others:
            if words[self._lines[r] + _TAG + parity] != tag:
                raise self._fail(CallMismatch(self.name, self.rank, r, sequence))
        return views

    def _await_attached(self) -> None:
        self._await(_PID, 1)
        for r in self._others:
            line = self._lines[r]
            identity = ProcessIdentity(self._words[line + _PID], self._words[line + _START])
            try:
                pidfd = pidfd_of(identity)
            except ProcessLookupError:
                raise self._fail(RankDied(self.name, r, identity.pid)) from None
            self._pidfds[pidfd] = r
            self._sleeper.watch(pidfd)

    def _await(self, field: int, least: int) -> None:
        """Until the word `field` of all the others is at least that."""
        words = self._words
        deadline = self._monotonic() + self._timeout_s
        for r in self._others:
            index = self._lines[r] + field
            self._awaited = r
            while (seen := words[index]) < least:
                try:
                    changed = self._condition.wait(index, seen, deadline)
                except TransportError as error:
                    raise self._fail(error) from None
                if not changed:
                    raise self._fail(self._timeout(field, least))

    def _timeout(self, field: int, least: int) -> TransportTimeout:
        missing = tuple(r for r in self._others if self._words[self._lines[r] + field] < least)
        names = [f"rank {r} (pid {self._words[self._lines[r] + _PID] or 'unknown'})" for r in missing]
        what = "attach" if field == _PID else f"come to exchange {least}"
        return TransportTimeout(
            f"{', '.join(names)} of {self.name!r} did not {what} within {self._timeout_s:g} s",
            queue=self.name,
            waited_s=self._timeout_s,
            missing_ranks=missing,
        )

    def _raise_dead(self, pidfd: int) -> None:
        rank = self._pidfds[pidfd]
        raise RankDied(self.name, rank, self._words[self._lines[rank] + _PID])

    def _fail(self, error: TransportError) -> TransportError:
        """The ranks no longer agree on what was exchanged, so this was the last call."""
        self._failure = error
        return error

    def _ring_sleepers(self) -> None:
        # Announcing sleep and looking at the word, publishing the word and looking at the announcement: with
        # a fence between, one of the two sides sees the other.
        memory_fence()
        words, rung = self._words, self._rung
        for r in self._others:
            nap = words[self._lines[r] + _PARKED]
            if nap and nap != rung[r]:
                rung[r] = nap
                os.eventfd_write(self._doorbells[r], 1)

    def _park(self) -> None:
        self._naps += 1
        self._words[self._line + _PARKED] = self._naps
        if self.on_sleep is not None:
            self.on_sleep(self._awaited)

    def _unpark(self) -> None:
        self._words[self._line + _PARKED] = 0
        if self.on_sleep is not None:
            self.on_sleep(-1)
