"""The file in which an engine's decisions are recorded.

Layout: `MAGIC`, then frames, each a 12-byte head (payload length and CRC-32 as little-endian uint32, and the
frame's number) and a payload in MessagePack. The first frame is a `Header`, all others are lists of entries.
An entry is a list whose first element says what happened:

    ADD       request id, prompt, sampling params, client index, priority, arrival time, cache salt, LoRA
              adapter
    REFUSED   request id, code: the ADD before was not taken
    FINISH    request ids or nil for all, finish reason: ended from outside
    PLAN      step id, slots, counts, computed, new requests, slots of new blocks, their ids, finished slots,
              preempted slots; a new request is [slot, id, computed, block ids]
    SAME      step id, slots of new blocks, their ids: the rows of the step before, each with the tokens of
              that step computed and one more to compute, and nothing else
    RESULT    step id, rows, sampled tokens (row by row), number sampled in each row (nil: one)
    PAUSE     pause state
    RESET     reset_running: the prefix cache was reset
    RESTART   the workers were replaced
    ALLOW     request ids: nobody else may run; nil: everybody may
    LIMITS    requests that may run, tokens of a step
    LOST      number of entries that could not be written in time; what follows cannot be replayed
    STATE     the scheduler's state (`lab.snapshot`): the record begins in the middle of a run

Arrays are the bytes of little-endian int32.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine_core.config import EngineConfig
from executor.base import EngineCapacity

MAGIC = b"engine-core decisions 1\n"
_HEAD = struct.Struct("<III")


class Entry(enum.IntEnum):
    ADD = 0
    REFUSED = 1
    FINISH = 2
    PLAN = 3
    SAME = 4
    RESULT = 5
    PAUSE = 6
    RESET = 7
    RESTART = 8
    LOST = 9
    STATE = 10
    ALLOW = 11
    LIMITS = 12


class Header(msgspec.Struct, kw_only=True):
    engine_version: str
    started: float  # Unix time
    config: EngineConfig
    capacity: EngineCapacity
    part: int = 0  # number of the file, from the engine's start on


class RecordError(Exception):
    """A file is no record, or not a whole one. `frame` counts its readable frames."""

    def __init__(self, path: str, frame: int, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.frame = frame
        self.reason = reason


class RecordWriter:
    """Appends frames to a new file. Not thread-safe."""

    def __init__(self, path: str, header: Header) -> None:
        """Raises OSError."""
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self.size_bytes = self._file.write(MAGIC)
        self.write(header)

    def write(self, payload: object) -> None:
        """One frame, in one system call. Raises OSError."""
        data = self._encoder.encode(payload)
        self.size_bytes += self._file.write(_HEAD.pack(len(data), zlib.crc32(data), self._number) + data)
        self._number += 1

    def close(self) -> None:
        self._file.close()


def is_record(path: str) -> bool:
    """Whether a file begins as a record does, or is empty. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) in (MAGIC, b"")


class RecordReader:
    """Reads a record's header at once, and its entries one by one."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError, and `RecordError` if the file does not begin as a record does."""
        self.path = str(path)
        self._frame = 0
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115
        try:
            if self._file.read(len(MAGIC)) != MAGIC:
                raise self._error("is no record of an engine's decisions")
            head = self._next_frame()
            if head is None:
                raise self._error("ends before its header")
            try:
                self.header = msgspec.msgpack.decode(head, type=Header)
            except msgspec.DecodeError as error:
                raise self._error(f"was recorded by another version: {error}") from None
        except BaseException:
            self._file.close()
            raise

    def entries(self) -> Iterator[list[Any]]:
        """In order. Raises `RecordError` where the file breaks off or is damaged; all before is good."""
        decoder = msgspec.msgpack.Decoder(list[list[Any]])
        while (data := self._next_frame()) is not None:
            try:
                yield from decoder.decode(data)
            except msgspec.DecodeError as error:
                raise self._error(f"frame {self._frame - 1} cannot be read: {error}") from None

    def _next_frame(self) -> bytes | None:
        head = self._file.read(_HEAD.size)
        if not head:
            return None
        if len(head) == _HEAD.size:
            length, checksum, number = _HEAD.unpack(head)
            if number != self._frame:
                raise self._error(f"is damaged at frame {self._frame}")
            data = self._file.read(length)
            if len(data) == length:
                if zlib.crc32(data) != checksum:
                    raise self._error(f"is damaged at frame {self._frame}: its checksum is wrong")
                self._frame += 1
                return data
        raise self._error(f"is truncated: it breaks off in frame {self._frame}")

    def _error(self, reason: str) -> RecordError:
        return RecordError(self.path, self._frame, reason)

    def close(self) -> None:
        self._file.close()
