"""What an engine and its ranks are doing, in a page of shared memory that is readable through hang and crash.

The engine writes one row and each rank its own. Any process of the same user reads them without a socket, a
lock or a system call, and without help from the writers. The page describes itself: a reader of another
version prints every field, with its unit, from the table inside the page.

    header      magic, layout version, where the rest is    written once, magic last
    schema      JSON: the fields of both kinds of row       written once
    engine row  `EngineRow`                                 written by the engine
    rank rows   `RankRow`, one per rank                     each written by that rank

The page is a memfd that the engine creates and its ranks inherit. It has no name in any file system, so it
cannot be left behind: it goes with the last process that holds it. Readers find it as `/proc/<pid>/fd/<n>`,
which the kernel opens for the same user (and root) only; as long as one rank lives, the state of a dead
engine can be read too. The page is sealed against a change of size, so that a reader's mapping never faults.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from transport.errors import TransportError
from transport.processes import ProcessIdentity
from transport.shared_row import WORD, FieldInfo, copy_row, decode_row
from transport.state_rows import EngineRow, RankRow

NAME = "engine-core-state"
LAYOUT = 1  # of the header and the schema; a new field is no new layout

_MAGIC = b"ECSTATE\0"
# Magic, layout, schema (offset, bytes), offset of the engine row, rank rows (offset, stride, number).
_HEADER = struct.Struct("=8s7Q")
_LINK = f"/memfd:{NAME} (deleted)"
_ALIGN = 64  # rows of different writers share no cache line
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_FILE_BYTES = 16 << 20
_MID_WRITE_GRACE_S = 0.02  # for a writer that lost the CPU in mid-write


class PageSchema(msgspec.Struct):
    """The fields of both kinds of row, as the page itself carries them."""

    engine: list[FieldInfo]
    rank: list[FieldInfo]


_SCHEMA = PageSchema(EngineRow.schema(), RankRow.schema())


class StatePageError(TransportError):
    """There is no state page to read here; the text says what was found instead."""


@dataclass(frozen=True, slots=True)
class PageLocation:
    """A page that some process of this host holds."""

    engine_pid: int  # as the page says; 0 before the engine has filled its row
    path: Path  # for `StatePage.open`
    holders: tuple[int, ...]  # pids; without `engine_pid` among them the engine is gone


class PageView:
    """Reader's side of a page, of any version with the same layout."""

    def __init__(self, buffer: mmap.mmap | bytes, source: str) -> None:
        """Raises StatePageError if `buffer` does not hold a page."""
        self.source = source
        self._buffer = buffer
        self._memory = memoryview(buffer)
        try:
            self.schema, self.places = self._read_header()
        except StatePageError:
            self.close()
            raise

    def _read_header(self) -> tuple[PageSchema, tuple[slice, list[slice]]]:
        size = len(self._memory)
        if size < _HEADER.size or self._memory[: len(_MAGIC)] != _MAGIC:
            raise StatePageError(f"{self.source}: not an engine's state page, or one still being made")
        _, self.layout, schema, schema_bytes, engine, ranks, stride, count = _HEADER.unpack_from(self._memory)
        if self.layout != LAYOUT:
            raise StatePageError(
                f"{self.source}: a state page of layout {self.layout}, but this version reads layout {LAYOUT}"
            )
        end = ranks + stride * count
        in_order = _HEADER.size <= schema <= schema + schema_bytes <= engine <= ranks <= end <= size
        if not in_order or engine % WORD or ranks % WORD or stride % WORD:
            raise StatePageError(f"{self.source}: a damaged state page, its parts do not fit {size} bytes")
        try:
            found = msgspec.json.decode(self._memory[schema : schema + schema_bytes], type=PageSchema)
        except msgspec.DecodeError as error:
            raise StatePageError(f"{self.source}: a damaged state page, its schema: {error}") from error
        for infos, room in ((found.engine, ranks - engine), (found.rank, stride)):
            if any(not 0 < info.word <= info.word + info.words <= room // WORD for info in infos):
                raise StatePageError(f"{self.source}: a damaged state page, a field lies outside its row")
        places = [slice(start, start + stride) for start in range(ranks, end, stride)] if stride else []
        return found, (slice(engine, ranks), places)

    def snapshot(self) -> dict[str, Any]:
        """The page as plain data: {"engine": {field: value}, "ranks": [{field: value}, ...]}.

        Each row is of one moment of its own. If that cannot be had, it has one more entry, "torn", which
        says why; its values may then mix two moments.
        """
        engine, ranks = self.places
        return {
            "engine": self._row(engine, self.schema.engine),
            "ranks": [self._row(place, self.schema.rank) for place in ranks],
        }

    def _row(self, place: slice, schema: list[FieldInfo]) -> dict[str, Any]:
        copy, whole = self._copy(place, schema)
        row = decode_row(copy, schema)
        if not whole:
            alive = ProcessIdentity(row.get("pid", 0), row.get("start_ticks", 0)).is_alive()
            row["torn"] = "by a writer stopped in mid-write" if alive else "by a dead writer"
        return row

    def _copy(self, place: slice, schema: list[FieldInfo]) -> tuple[bytearray, bool]:
        copy, whole = copy_row(self._memory[place], schema)
        if not whole:
            time.sleep(_MID_WRITE_GRACE_S)
            copy, whole = copy_row(self._memory[place], schema)
        return copy, whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Copies the page over `path`, in one write, so that it can be read after everything has died."""
        image = self.image()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, image, 0)
            os.ftruncate(fd, len(image))
        finally:
            os.close(fd)

    def image(self) -> bytes:
        """The page as bytes, which `StatePage.open` reads from a file; each row of one moment if possible."""
        image = bytearray(self._memory)
        engine, ranks = self.places
        image[engine] = self._copy(engine, self.schema.engine)[0]
        for place in ranks:
            image[place] = self._copy(place, self.schema.rank)[0]
        return bytes(image)

    def close(self) -> None:
        self._memory.release()
        if isinstance(self._buffer, mmap.mmap):
            self._buffer.close()

    def __enter__(self) -> PageView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StatePage:
    """The page of one engine, from the writers' side: made by the engine, attached by its ranks."""

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, the descriptor of a complete page. Raises StatePageError if it is none."""
        self.fd = fd  # for the ranks to inherit; kept open, because readers find the page through it
        self.view = PageView(mmap.mmap(fd, 0, prot=mmap.PROT_READ), f"fd {fd}")
        if self.view.schema != _SCHEMA:
            self.view.close()
            raise StatePageError(f"fd {fd}: the page of another version, whose rows this one cannot write")
        self._mapping = mmap.mmap(fd, 0)
        memory = memoryview(self._mapping)
        engine, ranks = self.view.places
        self.engine = EngineRow(memory[engine])  # to be written by the engine process, and by no other
        self._ranks = [RankRow(memory[place]) for place in ranks]

    @classmethod
    def create(cls, num_ranks: int) -> StatePage:
        """A fresh page with empty rows."""
        schema = msgspec.json.encode(_SCHEMA)
        engine = _aligned(_HEADER.size + len(schema))
        ranks = engine + _aligned(EngineRow.num_bytes)
        stride = _aligned(RankRow.num_bytes)
        header = _HEADER.pack(_MAGIC, LAYOUT, _HEADER.size, len(schema), engine, ranks, stride, num_ranks)
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, ranks + stride * num_ranks)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(fd, header[len(_MAGIC) :] + schema, len(_MAGIC))
        os.pwrite(fd, _MAGIC, 0)  # last: until then a reader that finds the page knows it is not ready
        return cls(fd)

    def rank(self, rank: int) -> RankRow:
        """The row to be written by that rank's process, and by no other."""
        return self._ranks[rank]

    def snapshot(self) -> dict[str, Any]:
        """See `PageView.snapshot`."""
        return self.view.snapshot()

    def close(self) -> None:
        """Lets go of the page; it vanishes with its last holder."""
        for row in (self.engine, *self._ranks):
            row.release()
        self._mapping.close()
        self.view.close()
        os.close(self.fd)

    def __enter__(self) -> StatePage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @staticmethod
    def open(target: int | str | os.PathLike[str]) -> PageView:
        """Opens a page for reading, by an engine's pid, a path from `find`, or a file that `save` wrote.

        Raises StatePageError if there is no page, OSError if the path cannot be opened.
        """
        if isinstance(target, int):
            for location in StatePage.find():
                if target == location.engine_pid:
                    return _open(location.path)
            raise StatePageError(f"no process of this user holds the state page of engine {target}")
        return _open(Path(target))

    @staticmethod
    def find() -> list[PageLocation]:
        """The pages of this user's engines on this host (of all users', for root), in order of their pids."""
        holders: dict[tuple[int, int], dict[int, Path]] = {}
        for pid, path in _held_pages():
            with contextlib.suppress(FileNotFoundError):  # the process has just ended
                stat = path.stat()
                holders.setdefault((stat.st_dev, stat.st_ino), {}).setdefault(pid, path)
        locations = []
        for paths in holders.values():
            path = next(iter(paths.values()))
            with contextlib.suppress(FileNotFoundError, StatePageError), _open(path) as view:
                pid = view.snapshot()["engine"].get("pid", 0)
                locations.append(PageLocation(pid, paths.get(pid, path), tuple(sorted(paths))))
        return sorted(locations, key=lambda location: location.engine_pid)


def _held_pages() -> Iterator[tuple[int, Path]]:
    """Each descriptor of a state page in the processes that this user may look into."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            names = os.listdir(process / "fd")
        except (PermissionError, FileNotFoundError, ProcessLookupError):  # another user's, or gone by now
            continue
        for name in names:
            path = process / "fd" / name
            with contextlib.suppress(OSError):  # closed since
                if os.readlink(path) == _LINK:
                    yield int(process.name), path


def _open(path: Path) -> PageView:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _is_sealed(fd):
            return PageView(mmap.mmap(fd, 0, prot=mmap.PROT_READ), str(path))
        # Anybody may cut an ordinary file short, and a mapping of it would fault then.
        return PageView(os.pread(fd, _MAX_FILE_BYTES, 0), str(path))
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # a file system without seals
        return False


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
