"""A row of typed fields in shared memory: one process writes it, any number read it, and nobody waits.

A subclass of `Row` lists its fields; the list also describes the row to readers that do not have the class
(`Row.schema`). A row is a sequence of 8-byte words in the machine's byte order:

    word 0      sequence: even while the row is at rest, odd while it is being written
    word 1 ...  the fields, in order of declaration; a text is a length in bytes, then the bytes

    written by  the owner process only; its threads take turns under a lock
    read by     anybody; a copy counts if the sequence was even, and the same before and after it

A field declared `atomic` is one word that is stored on its own, without the sequence, so that a thread
beside the row's usual writer can keep it: a heartbeat must go on while that writer is stuck. Nothing here
makes a system call.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, overload

import msgspec

from transport.waiting import memory_fence

WORD = 8
_ATTEMPTS = 200  # of a reader, at a microsecond or more each: far longer than a write takes

T = TypeVar("T")
FieldT = TypeVar("FieldT", bound="Field[Any]")


class FieldInfo(msgspec.Struct, omit_defaults=True):
    """How a reader finds and prints one field."""

    name: str
    type: str  # u64, f64, choice, text; a reader prints others as raw bytes
    word: int  # offset in the row, in words
    words: int = 1
    unit: str = ""
    about: str = ""
    choices: list[str] = []
    atomic: bool = False


class Field(Generic[T]):
    """One field of a `Row`. Assigning to it is one sequence-locked write; reading it is for the owner."""

    kind: ClassVar[str]  # `FieldInfo.type`
    code: ClassVar[str] = ""  # of struct, for fields of one word

    def __init__(self, unit: str = "", about: str = "", *, words: int = 1, atomic: bool = False) -> None:
        self.name = ""
        self.word = 0
        self.words = words
        self.unit = unit
        self.about = about
        self.atomic = atomic

    def __set_name__(self, owner: type[Row], name: str) -> None:
        self.name = name

    @overload
    def __get__(self: FieldT, row: None, owner: type[Row]) -> FieldT: ...
    @overload
    def __get__(self, row: Row, owner: type[Row]) -> T: ...
    def __get__(self, row: Row | None, owner: type[Row]) -> Any:
        return self if row is None else self.load(row)

    def __set__(self, row: Row, value: T) -> None:
        if self.atomic:
            self.store(row, value)
        else:
            row.write(self.store, value)

    def load(self, row: Row) -> T:
        raise NotImplementedError

    def store(self, row: Row, value: T) -> None:
        """Without the sequence: for use inside `Row.write`."""
        raise NotImplementedError

    def info(self) -> FieldInfo:
        return FieldInfo(
            name=self.name,
            type=self.kind,
            word=self.word,
            words=self.words,
            unit=self.unit,
            about=self.about,
            atomic=self.atomic,
        )


class Count(Field[int]):
    """An integer of 0 to 2**64 - 1."""

    kind = "u64"
    code = "Q"

    def load(self, row: Row) -> int:
        return row.words[self.word]

    def store(self, row: Row, value: int) -> None:
        row.words[self.word] = value


class Real(Field[float]):
    kind = "f64"
    code = "d"

    def load(self, row: Row) -> float:
        return row.floats[self.word]

    def store(self, row: Row, value: float) -> None:
        row.floats[self.word] = value


class Choice(Field[str]):
    """One of a few names; a fresh row holds the first. Assigning another name raises ValueError."""

    kind = "choice"
    code = "Q"  # the index

    def __init__(self, *choices: str, about: str = "") -> None:
        super().__init__(about=about)
        self.choices = choices

    def load(self, row: Row) -> str:
        return self.choices[row.words[self.word]]

    def store(self, row: Row, value: str) -> None:
        row.words[self.word] = self.choices.index(value)

    def info(self) -> FieldInfo:
        info = super().info()
        info.choices = list(self.choices)
        return info


class Text(Field[str]):
    """A UTF-8 text, cut between characters when it is longer than `capacity` bytes."""

    kind = "text"

    def __init__(self, capacity: int, about: str = "") -> None:
        super().__init__(about=about, words=1 + -(-capacity // WORD))
        self.capacity = (self.words - 1) * WORD

    def load(self, row: Row) -> str:
        start = (self.word + 1) * WORD
        return str(row.memory[start : start + row.words[self.word]], "utf-8")

    def store(self, row: Row, value: str) -> None:
        data = value.encode("utf-8", "replace")
        if len(data) > self.capacity:
            data = data[: self.capacity].decode("utf-8", "ignore").encode()
        start = (self.word + 1) * WORD
        row.memory[start : start + len(data)] = data
        row.words[self.word] = len(data)


class Row:
    """Writer's side of a row. Not to be written from a signal handler, which may interrupt a write."""

    fields: ClassVar[dict[str, Field[Any]]] = {}
    num_bytes: ClassVar[int] = WORD

    __slots__ = ("_lock", "_sequence", "floats", "memory", "words")

    def __init_subclass__(cls) -> None:
        word = cls.num_bytes // WORD
        cls.fields = dict(cls.fields)
        for name, field in vars(cls).items():
            if isinstance(field, Field):
                cls.fields[name] = field
                field.word = word
                word += field.words
        cls.num_bytes = word * WORD

    def __init__(self, memory: memoryview) -> None:
        """`memory` is writable, aligned to 8 bytes and at least `num_bytes` long; nothing is written yet."""
        self.memory = memory
        self.words = memory.cast("Q")
        self.floats = memory.cast("d")
        self._lock = threading.Lock()
        # A writer killed in mid-write left an odd number: the next write has to end on an even one.
        self._sequence = self.words[0] + (self.words[0] & 1)

    @classmethod
    def schema(cls) -> list[FieldInfo]:
        return [field.info() for field in cls.fields.values()]

    @classmethod
    def block(cls, first: str, last: str) -> tuple[struct.Struct, slice]:
        """Packer of the fields from `first` to `last`, in order of declaration, and its place in `memory`."""
        names = list(cls.fields)
        block = [cls.fields[name] for name in names[names.index(first) : names.index(last) + 1]]
        if any(not field.code or field.atomic for field in block):
            raise TypeError(f"{first} .. {last}: a block has only fields of one word under the sequence")
        start = block[0].word * WORD
        packer = struct.Struct("=" + "".join(field.code for field in block))
        return packer, slice(start, start + packer.size)

    def write(self, store: Callable[..., None], *values: Any) -> None:
        """Calls `store(self, *values)` as one sequence-locked write."""
        with self._lock:  # unlike a pair of calls it is let go of whatever a signal handler raises, and when
            sequence = self._sequence
            self.words[0] = sequence + 1
            memory_fence()  # the odd number is out before any field changes
            try:
                store(self, *values)
            finally:
                memory_fence()  # every field is out before the even number
                self.words[0] = self._sequence = sequence + 2

    def clear(self) -> None:
        """Sets every field to zero, without the sequence: for use inside `write`."""
        self.memory[WORD:] = bytes(len(self.memory) - WORD)

    def release(self) -> None:
        """Lets go of the memory, so that its mapping can be closed."""
        self.words.release()
        self.floats.release()
        self.memory.release()


def copy_row(memory: memoryview, schema: Sequence[FieldInfo]) -> tuple[bytearray, bool]:
    """Copies a row that another process may be writing.

    Returns the copy, and whether it is of one moment. It is not if the writer was in mid-write all the time:
    dead, stopped, or off the CPU. Gives up in less than a millisecond, without a system call.
    """
    words = memory.cast("Q")
    for _ in range(_ATTEMPTS):
        before = words[0]
        memory_fence()
        copy = bytearray(memory)
        memory_fence()
        whole = not before & 1 and words[0] == before
        if whole:
            break
    target = memoryview(copy).cast("Q")
    for info in schema:
        if info.atomic:  # the copy above need not have gone word by word
            target[info.word] = words[info.word]
    return copy, whole


def decode_row(data: bytes | bytearray, schema: Sequence[FieldInfo]) -> dict[str, Any]:
    """Field names to values; works for torn rows and for types this version does not know."""
    row: dict[str, Any] = {}
    for info in schema:
        raw = bytes(data[info.word * WORD : (info.word + info.words) * WORD])
        number = int.from_bytes(raw[:WORD], sys.byteorder)
        if info.type == "u64":
            row[info.name] = number
        elif info.type == "f64":
            row[info.name] = struct.unpack("=d", raw)[0]
        elif info.type == "choice":
            row[info.name] = info.choices[number] if number < len(info.choices) else f"unknown ({number})"
        elif info.type == "text":
            row[info.name] = raw[WORD : WORD + number].decode("utf-8", "replace")
        else:
            row[info.name] = raw.hex()
    return row
