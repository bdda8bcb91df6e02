"""A byte ring in shared memory: one writer, 1 to 64 readers, each of which reads every record once and in
order.

`ShmRingBuffer` is the segment; `RingWriter` and `RingReader` are its two ends. They never block: a full or
empty ring is a return value, and waiting is the business of `waiting.SpinCondition`. Nothing here has a name
in the file system.

Layout, in bytes. A line is 128 bytes (two cache lines, because x86 fetches them in pairs), every word is a
native u64:

    offset          field        written by       read by          meaning
    0               MAGIC        writer, once     readers          layout and its version
    8               CAPACITY     writer, once     readers          bytes of data, a power of two
    16              READERS      writer, once     readers          number of reader lines
    128             TAIL         writer           readers          bytes published since the start
    256             STATE        writer           readers          0 open, 1 closed
    384             WANT         writer           readers          sleeping until every HEAD is here; 0: awake
    512 + i         PARKED[i]    reader i         writer           one byte: reader i sleeps, or is about to
    640 + 128 i     HEAD[i]      reader i         writer           bytes released since the start
    648 + 128 i     EPOCH[i]     reader i         writer           number of the sleep that PARKED announces
    656 + 128 i     LEFT[i]      reader i         writer           1: closed its end
    page boundary   data         writer           readers          records

    record, 64-byte aligned:    | kind << 56 | length |  payload ...  |

    DATA    a message               PAD     nothing more up to the end of the data: go on at its start
    FIRST   a message's total length (u64) and its first bytes        MORE, LAST    the following bytes

Every word has one writer and is stored whole, so no read-modify-write is needed and none can tear. Readers
look only at TAIL, and bytes beyond it do not exist for them: a writer that is killed half-way leaves no torn
record. The payload is stored before the header, the header before TAIL; a reader loads in the opposite order.
x86 keeps both orders; elsewhere a fence does.

The writer wakes only who sleeps. It publishes, fences, and looks at PARKED; a reader that wants to sleep
announces, fences, and looks at TAIL: one of the two sees the other. The writer must not clear PARKED (a fast
reader may have parked again), so it remembers the EPOCH it rang for and rings once per sleep. It also looks
before it copies, so that waking up and copying overlap. A reader that was rung too early or for nothing and
sleeps again announces a new epoch.

When all readers are level and the ring is beyond its hot part, the writer goes back to the start, so that a
small working set stays in the cache instead of marching through all of the memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transport.errors import TransportError
from transport.waiting import TOTAL_STORE_ORDER, memory_fence

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Buffer = bytes | bytearray | memoryview | npt.NDArray[np.generic]

MAX_READERS = 64
MIN_CAPACITY = 4096

_MAGIC = int.from_bytes(b"ecring\x00\x01", "little")
_MAGIC_WORD, _CAPACITY, _READERS = 0, 1, 2  # indices of 64-bit words
_TAIL, _STATE, _WANT, _PARKED = 16, 32, 48, 64
_LINES, _LINE = 80, 16  # HEAD, EPOCH, LEFT of reader i at _LINES + _LINE * i + 0, 1, 2
_OPEN, _CLOSED = 0, 1

_KIND_SHIFT = 56
_LENGTH_MASK = (1 << _KIND_SHIFT) - 1
DATA, PAD, FIRST, MORE, LAST = (kind << _KIND_SHIFT for kind in range(5))
_HEADER = 8
ONE_LOOK = range(1)
_HOT_BYTES = 256 << 10  # stays in any second-level cache


def _record_bytes(length: int) -> int:
    """Bytes that a payload takes up in the ring: header and payload, rounded up to 64."""
    return (length + _HEADER + 63) & -64


def nbytes_of(part: Buffer) -> int:
    """Bytes of a contiguous buffer."""
    return len(part) if isinstance(part, (bytes, bytearray)) else part.nbytes


class ShmRingBuffer:
    """The shared segment. Anonymous: it lives as long as somebody maps it or holds its descriptor `fd`."""

    def __init__(self, fd: int, n_readers: int, capacity: int) -> None:
        self.fd = fd
        self.n_readers = n_readers
        self.capacity = capacity
        self.data_offset = (8 * (_LINES + _LINE * n_readers) + 4095) & -4096
        # Faulted in now: a first touch costs a page fault, 30 times what copying that page costs.
        self.map = mmap.mmap(fd, self.data_offset + capacity, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.view = memoryview(self.map)
        self.words = self.view.cast("Q")

    @classmethod
    def create(cls, n_readers: int, capacity: int) -> ShmRingBuffer:
        """A new segment of at least `capacity` bytes (rounded up to a power of two) for `n_readers` readers.

        Raises ValueError for sizes out of range and TransportError if there is not enough memory.
        """
        if not 1 <= n_readers <= MAX_READERS:
            raise ValueError(f"a ring has 1 to {MAX_READERS} readers, not {n_readers}")
        if capacity < MIN_CAPACITY:
            raise ValueError(f"a ring has at least {MIN_CAPACITY} bytes, not {capacity}")
        capacity = 1 << (capacity - 1).bit_length()
        size = ((8 * (_LINES + _LINE * n_readers) + 4095) & -4096) + capacity
        ring = cls(anonymous_file(size, "engine-core-ring"), n_readers, capacity)
        ring.words[_CAPACITY] = capacity
        ring.words[_READERS] = n_readers
        ring.words[_MAGIC_WORD] = _MAGIC
        return ring

    @classmethod
    def from_fd(cls, fd: int) -> ShmRingBuffer:
        """Map a segment that another process created. Raises TransportError if it is not one, or of another
        version.
        """
        with mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as head:
            magic, capacity, n_readers = memoryview(head).cast("Q")[:3].tolist()
        if magic != _MAGIC:
            raise TransportError("the descriptor is not a ring of this version of the transport")
        return cls(fd, n_readers, capacity)

    def close_fd(self) -> None:
        """The mapping does not need the descriptor; only handing the segment on does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap the segment, now or when the last view of a message goes."""
        self.close_fd()
        self.words.release()
        self.view.release()
        with contextlib.suppress(BufferError):  # somebody still has a view or an array of a message
            self.map.close()


def anonymous_file(size: int, label: str) -> int:
    """A descriptor of `size` bytes of allocated shared memory without a name; `ls /proc/PID/fd` shows
    `label`.

    Raises TransportError if there is not enough memory.
    """
    if size > (available := available_memory()):
        # The kernel would end processes, and not refuse.
        raise TransportError(f"cannot allocate {size} bytes of shared memory: {available} are available")
    try:
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM):
            raise TransportError(f"cannot create shared memory: {error}") from error
        return _unlinked_file(size)
    try:
        os.posix_fallocate(fd, 0, size)  # a sparse file would kill whoever touches it when memory runs out
    except OSError as error:
        os.close(fd)
        raise TransportError(f"cannot allocate {size} bytes of shared memory: {error}") from error
    # Nobody who holds the descriptor can truncate it under the others' feet.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def available_memory() -> int:
    """Bytes that the host has left for new allocations."""
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return sys.maxsize


def _unlinked_file(size: int) -> int:
    """Where the kernel has no memfd: a file in /dev/shm that loses its name before anything else happens to
    it.
    """
    path = f"/dev/shm/engine-core-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise TransportError(f"/dev/shm has no room for {size} bytes: {error}") from error
    return fd


class RingWriter:
    """The writing end. `doorbells[i]` is the eventfd on which reader i sleeps. One thread at a time."""

    def __init__(self, ring: ShmRingBuffer, doorbells: Sequence[int]) -> None:
        self.wakes = 0
        # Half of the ring, so that a record and the padding before it always fit together.
        self.max_payload = ring.capacity // 2 - _HEADER
        self.piece_bytes = ring.capacity // 4 - 64  # of a message larger than that: four pieces fill the ring
        self._ring = ring
        self._doorbells = doorbells
        self._map = ring.map
        self._words = ring.words
        self._capacity = ring.capacity
        self._mask = ring.capacity - 1
        self._data = ring.data_offset
        self._payloads = ring.data_offset + _HEADER
        self._heads = [_LINES + _LINE * i for i in range(ring.n_readers)]
        self._park_words = range(_PARKED, _PARKED + (ring.n_readers + 7) // 8)
        self._is_wide = len(self._park_words) > 1
        self._rung = [0] * ring.n_readers  # the epoch that each reader was last rung for
        self._tail = 0
        self._limit = ring.capacity  # the ring may be written up to here: smallest HEAD seen + capacity
        self._needed = 0  # the record that did not fit needs every HEAD to be here
        self._largest = 0  # recent large records widen the hot part
        self._turn_at = self._hot_bytes()  # a record that ends beyond asks whether to go back to the start

    def try_write(self, parts: Sequence[Buffer], nbytes: int, kind: int = DATA) -> bool:
        """Publish `parts` (together `nbytes` bytes) as one record and wake who sleeps. False: no room now.

        `nbytes` must not exceed `max_payload`. Nothing is published if a part cannot be copied.
        """
        words = self._words
        if words[_PARKED]:
            self._wake()  # already: a reader takes longer to wake up than this takes to publish
        tail = self._tail
        offset = tail & self._mask
        size = (nbytes + 71) & -64
        end = tail + size
        if end > self._limit or offset + size > self._turn_at:
            place = self._find_place(tail, offset, size)
            if place is None:
                return False
            offset = place & self._mask
            end = place + size
        start = self._payloads + offset
        if len(parts) == 1:
            self._map[start : start + nbytes] = parts[0]  # type: ignore[assignment]
        else:
            at = start
            for part in parts:
                stop = at + (len(part) if part.__class__ is bytes else nbytes_of(part))
                self._map[at:stop] = part  # type: ignore[assignment]
                at = stop
        words[(start >> 3) - 1] = kind | nbytes
        if not TOTAL_STORE_ORDER:
            memory_fence()
        words[_TAIL] = self._tail = end
        memory_fence()
        if words[_PARKED] or (self._is_wide and any(map(words.__getitem__, self._park_words))):
            self._wake()
        return True

    def slowest(self) -> tuple[int, int]:
        """Index of the reader that has released least, and the index of its HEAD word."""
        words = self._words
        head = min(self._heads, key=words.__getitem__)
        return (head - _LINES) // _LINE, head

    def word(self, index: int) -> int:
        return int(self._words[index])

    def lag(self, reader: int) -> tuple[int, int]:
        """How far a reader is behind: messages not yet released, and bytes of the ring that they take up."""
        words = self._words
        head = at = words[self._heads[reader]]
        messages = 0
        while at < self._tail:
            offset = at & self._mask
            header = words[(self._data + offset) >> 3]
            kind, length = header & ~_LENGTH_MASK, header & _LENGTH_MASK
            if kind == PAD:
                at += self._capacity - offset
                continue
            messages += kind in (DATA, LAST)
            at += _record_bytes(length)
        return messages, self._tail - head

    def has_left(self, reader: int) -> bool:
        """Whether a reader closed its end in good order."""
        return bool(self._words[self._heads[reader] + 2])

    def park(self) -> None:
        """Announce that this end sleeps until there is room: for the record that did not fit, and then some.

        Waking for each 64 bytes would be waking all the time, so a quarter of the ring is asked for; the
        caller looks for the room it really needs whenever its sleep ends.
        """
        self._words[_WANT] = max(self._needed, self._tail - self._capacity * 3 // 4, 1)

    def unpark(self) -> None:
        self._words[_WANT] = 0

    def finish(self) -> None:
        """Tell the readers that nothing will follow."""
        self._words[_STATE] = _CLOSED
        memory_fence()
        self._wake()

    def _find_place(self, tail: int, offset: int, size: int) -> int | None:
        """Where to write a record that does not simply follow: `tail`, or the start of the data after it.
        None: no room yet.
        """
        start = tail + self._capacity - offset
        if offset + size > self._capacity:
            place = start
        elif offset + size <= self._turn_at:
            place = tail
        else:
            self._largest = max(size, self._largest - self._largest // 8)
            self._turn_at = self._hot_bytes()
            # Going back needs room for the skipped part and the record, which fit if the record is no
            # longer than the part in front. And it is free only if nobody still reads.
            level = offset >= size and all(self._words[head] == tail for head in self._heads)
            place = start if level and offset + size > self._turn_at else tail
        if place + size > self._limit and not self._has_room(place + size):
            return None
        if place != tail:
            # Not before there is room: the place of this header may have been in use, too.
            self._words[(self._data + offset) >> 3] = PAD
            self._turn_at = self._hot_bytes()
        elif offset + size > self._turn_at:
            self._turn_at = min(
                offset + size + _HOT_BYTES // 4, self._capacity
            )  # do not ask at every message
        return place

    def _hot_bytes(self) -> int:
        return min(max(_HOT_BYTES, self._largest), self._capacity)

    def _has_room(self, end: int) -> bool:
        words = self._words
        lowest = min([words[head] for head in self._heads])
        if not TOTAL_STORE_ORDER:
            memory_fence()
        self._limit = lowest + self._capacity
        self._needed = end - self._capacity
        return end <= self._limit

    def _wake(self) -> None:
        parked, words = self._ring.view, self._words
        for reader, head in enumerate(self._heads):
            if parked[8 * _PARKED + reader]:
                if not TOTAL_STORE_ORDER:
                    memory_fence()
                epoch = words[head + 1]
                if epoch != self._rung[reader]:
                    self._rung[reader] = epoch
                    self.wakes += 1
                    os.eventfd_write(self._doorbells[reader], 1)


class RingReader:
    """Reader `index`'s end. `writer_doorbell` is the eventfd on which the writer sleeps. One thread at a
    time.
    """

    def __init__(self, ring: ShmRingBuffer, index: int, writer_doorbell: int) -> None:
        self.messages = 0
        self.payload_bytes = 0
        self.wakes = 0
        self._ring = ring
        self._words = ring.words
        self._readonly = ring.view.toreadonly()  # a reader cannot change what others still have to read
        self._mask = ring.capacity - 1
        self._data = ring.data_offset
        self._index = index
        self._head = _LINES + _LINE * index
        self._writer_doorbell = writer_doorbell
        self._rung = 0  # the WANT that the writer was last rung for
        self._at = int(ring.words[self._head])
        self._next = self._at  # where the record after the current one begins
        self._length = 0  # of the current message
        self._tail = self._at
        self._epoch = 0
        self._assembly: bytearray | None = None  # a message that arrives in pieces
        self._assembled = 0

    def try_read(self, looks: range = ONE_LOOK) -> memoryview | None:
        """The next message as a read-only view, valid until `release()`; None if `looks` looks have not
        seen one.
        """
        words = self._words
        while True:
            at = self._at
            if at == self._tail:
                for _ in looks:
                    if words[_TAIL] != at:
                        break
                else:
                    return None
                self._tail = words[_TAIL]
                if not TOTAL_STORE_ORDER:
                    memory_fence()
            start = self._data + (at & self._mask)
            header = words[start >> 3]
            if header <= _LENGTH_MASK:  # DATA
                self._next = at + ((header + 71) & -64)
                self._length = header
                return self._readonly[start + 8 : start + 8 + header]
            message = self._take_piece(start, header)
            if message is not None:
                return message

    def release(self) -> None:
        """Give the current message's bytes back to the writer; its view must not be used any more."""
        if not TOTAL_STORE_ORDER:
            memory_fence()
        at = self._at = self._next
        words = self._words
        words[self._head] = at
        self.messages += 1
        self.payload_bytes += self._length
        # Without a fence this look may come before the store, and the writer sleep on: its sleep is bounded
        # for that.
        want = words[_WANT]
        if want and at >= want != self._rung:
            self._rung = want
            self.wakes += 1
            os.eventfd_write(self._writer_doorbell, 1)

    def position(self) -> tuple[int, int]:
        """(index, value) of the word to wait on: it differs from the value once there is more to read."""
        return _TAIL, self._tail

    def offset(self) -> int:
        """Where in the data this reader is, in bytes."""
        return self._at & self._mask

    def is_closed(self) -> bool:
        """Whether the writer closed the ring in good order. What it published before can still be read."""
        return bool(self._words[_STATE] == _CLOSED)

    def has_more(self) -> bool:
        return bool(self._words[_TAIL] != self._tail)

    def park(self) -> None:
        """Announce that this end sleeps until TAIL moves. Each call is a new announcement."""
        self._epoch += 1
        self._words[self._head + 1] = self._epoch
        if not TOTAL_STORE_ORDER:
            memory_fence()
        self._ring.view[8 * _PARKED + self._index] = 1

    def unpark(self) -> None:
        self._ring.view[8 * _PARKED + self._index] = 0

    def leave(self) -> None:
        """Tell the writer that this reader will read no more."""
        self._words[self._head + 2] = 1

    def close(self) -> None:
        """Forget the segment, which the caller unmaps."""
        self._readonly.release()

    def _take_piece(self, start: int, header: int) -> memoryview | None:
        """Skip a padding, or add a piece to the message being put together and release it at once."""
        kind, length = header & ~_LENGTH_MASK, header & _LENGTH_MASK
        if kind == PAD:
            self._at = self._next = self._at + self._ring.capacity - self.offset()
            return None
        payload = start + _HEADER
        if kind == FIRST:  # an unfinished one before it was given up by the writer
            self._assembly = bytearray(self._words[payload >> 3])
            self._assembled = 0
            payload += 8
            length -= 8
        assembly = self._assembly
        if assembly is None:
            raise TransportError("a piece without a beginning: the ring is corrupt")
        assembly[self._assembled : self._assembled + length] = self._readonly[payload : payload + length]
        self._assembled += length
        self._next = self._at + _record_bytes(header & _LENGTH_MASK)
        self._length = 0
        self.release()
        self.messages -= 1  # that was not a message yet
        if kind != LAST:
            return None
        self._assembly = None
        self._length = len(assembly)
        return memoryview(assembly).toreadonly()
