"""How far each rank has come with what was broadcast: a page of shared memory, so that it can be read when a
rank hangs.

One line of three native i64 words per rank, each written by that rank alone and read by the executor:

    TAKEN    number of the last message it began with
    DONE     number of the last message it has done, its answer sent
    DONE_AT  when that was, CLOCK_MONOTONIC nanoseconds

The page is an anonymous file that the ranks inherit; it goes with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import time

_TAKEN, _DONE, _DONE_AT = range(3)
_LINE_WORDS = 16  # ranks do not share a pair of cache lines


class ProgressPage:
    """The page, made by the executor or opened by a rank with the inherited descriptor `fd`."""

    def __init__(self, world_size: int, fd: int | None = None) -> None:
        nbytes = world_size * _LINE_WORDS * 8
        if fd is None:
            fd = os.memfd_create("executor-progress", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
        self.fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self._words = memoryview(self._map).cast("q")

    def take(self, rank: int, seq: int) -> None:
        self._words[rank * _LINE_WORDS + _TAKEN] = seq

    def finish(self, rank: int, seq: int) -> None:
        line = rank * _LINE_WORDS
        self._words[line + _DONE_AT] = time.monotonic_ns()
        self._words[line + _DONE] = seq

    def taken(self, rank: int) -> int:
        return self._words[rank * _LINE_WORDS + _TAKEN]

    def done(self, rank: int) -> int:
        return self._words[rank * _LINE_WORDS + _DONE]

    def done_at_s(self, rank: int) -> float:
        """When the rank became free; 0.0 if it never was busy."""
        return self._words[rank * _LINE_WORDS + _DONE_AT] * 1e-9

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)
