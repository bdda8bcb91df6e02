"""The ring's protocol, single-stepped in one process: two ends over one mapping, no waiting."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import ShmRingBuffer, TransportError, ring
from transport.ring import FIRST, LAST, MORE, RingReader, RingWriter


class Ends:
    """A ring with its writer and readers, and doorbells that are real eventfds."""

    def __init__(self, readers: int, capacity: int) -> None:
        self.ring = ShmRingBuffer.create(readers, capacity)
        self.doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)]
        self.room = os.eventfd(0, os.EFD_NONBLOCK)
        self.writer = RingWriter(self.ring, self.doorbells)
        self.readers = [RingReader(self.ring, i, self.room) for i in range(readers)]

    def rings(self, fd: int) -> int:
        """How often an eventfd was rung since the last look."""
        try:
            return os.eventfd_read(fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.ring.close()
        for fd in (*self.doorbells, self.room):
            os.close(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(2, 4096)
    yield made
    made.close()


def read(reader: RingReader) -> bytes | None:
    view = reader.try_read()
    if view is None:
        return None
    data = bytes(view)
    reader.release()
    return data


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2040), st.integers(0, 255)), max_size=200),
)
def test_each_reader_reads_every_record_once_in_order(
    n_readers: int, steps: list[tuple[int, int, int]]
) -> None:
    """Against a model: any interleaving of writes and reads, sizes up to the largest record, many wraps."""
    ends = Ends(n_readers, 4096)
    try:
        sent: list[bytes] = []
        seen = [0] * n_readers
        for choice, size, fill in steps:
            data = bytes([fill, len(sent) & 255]) * (size // 2)
            if ends.writer.try_write([data[:1], data[1:]], len(data)):
                sent.append(data)
            else:
                assert min(seen) < len(sent), "an empty ring took no record"
            reader = choice % n_readers
            got = read(ends.readers[reader])
            if got is None:
                assert seen[reader] == len(sent), "a record was not visible"
            else:
                assert got == sent[seen[reader]]
                seen[reader] += 1
        for reader in range(n_readers):
            while (got := read(ends.readers[reader])) is not None:
                assert got == sent[seen[reader]]
                seen[reader] += 1
            assert seen[reader] == len(sent)
    finally:
        ends.close()


def test_the_same_with_the_fences_of_weakly_ordered_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "TOTAL_STORE_ORDER", False)
    test_each_reader_reads_every_record_once_in_order()
    ends = Ends(2, 4096)
    ends.readers[0].park()
    assert ends.writer.try_write([b"x"], 1)
    assert ends.rings(ends.doorbells[0]) == 1
    ends.close()


def test_an_empty_ring_takes_the_largest_record_at_every_position() -> None:
    ends = Ends(1, 4096)
    for step in range(200):
        assert ends.writer.try_write([bytes(step)], step)
        assert read(ends.readers[0]) is not None
        largest = ends.writer.max_payload
        assert ends.writer.try_write([b"x" * largest], largest), f"refused after {step} steps"
        assert read(ends.readers[0]) == b"x" * largest
    ends.close()


def test_a_ring_that_the_host_has_no_memory_for_is_refused() -> None:
    with pytest.raises(TransportError, match=r"cannot allocate .* are available"):
        ShmRingBuffer.create(1, 1 << 45)


def test_full_ring_refuses_until_the_slowest_has_released(ends: Ends) -> None:
    sent = 0
    while ends.writer.try_write([bytes(100)], 100):
        sent += 1
    assert sent == 4096 // 128
    assert ends.writer.lag(0) == ends.writer.lag(1) == (sent, 4096)
    fast, slow = ends.readers
    while read(fast) is not None:
        pass
    assert not ends.writer.try_write([bytes(100)], 100)
    assert ends.writer.slowest()[0] == 1
    assert ends.writer.lag(0) == (0, 0)
    view = slow.try_read()
    assert view is not None
    assert not ends.writer.try_write([bytes(100)], 100), "a held record was given away"
    slow.release()
    assert ends.writer.try_write([bytes(100)], 100)


def test_lag_counts_messages_and_not_padding_or_pieces(ends: Ends) -> None:
    for _ in range(3):
        ends.writer.try_write([bytes(1500)], 1500)
        for reader in ends.readers:
            read(reader)
    ends.writer.try_write([bytes(1500)], 1500)
    ends.writer.try_write([(3000).to_bytes(8, "little"), bytes(500)], 508, FIRST)
    ends.writer.try_write([bytes(500)], 500, MORE)
    assert ends.writer.lag(0)[0] == 1
    ends.writer.try_write([bytes(2000)], 0 + 2000, LAST)
    assert ends.writer.lag(0)[0] in (1, 2)


def test_a_message_in_pieces_arrives_whole_and_its_pieces_are_released_at_once() -> None:
    ends = Ends(1, 4096)
    data = os.urandom(20_000)
    writer, reader = ends.writer, ends.readers[0]
    for start in range(0, len(data), 900):
        piece = data[start : start + 900]
        kind = FIRST if start == 0 else MORE if start + 900 < len(data) else LAST
        parts = [len(data).to_bytes(8, "little"), piece] if kind == FIRST else [piece]
        assert writer.try_write(parts, sum(map(len, parts)), kind)
        view = reader.try_read()
        assert (view is not None) == (kind == LAST)
    assert view is not None and bytes(view) == data
    reader.release()
    assert writer.try_write([b"next"], 4)
    assert read(reader) == b"next"
    ends.close()


def test_a_message_given_up_half_way_is_dropped_by_the_readers(ends: Ends) -> None:
    ends.writer.try_write([(5000).to_bytes(8, "little"), bytes(500)], 508, FIRST)
    assert read(ends.readers[0]) is None
    ends.writer.try_write([b"whole"], 5)
    assert [read(reader) for reader in ends.readers] == [b"whole", b"whole"]
    ends.writer.try_write([(3).to_bytes(8, "little"), b"ab"], 10, FIRST)
    ends.writer.try_write([b"c"], 1, LAST)
    assert [read(reader) for reader in ends.readers] == [b"abc", b"abc"]


def test_nothing_is_published_when_a_part_cannot_be_copied(ends: Ends) -> None:
    with pytest.raises((BufferError, ValueError, TypeError, IndexError)):
        ends.writer.try_write([memoryview(bytes(100))[::2]], 50)
    assert read(ends.readers[0]) is None
    assert ends.writer.try_write([b"good"], 4)
    assert read(ends.readers[0]) == b"good"


def test_bytes_beyond_the_tail_do_not_exist_for_readers(ends: Ends) -> None:
    """A writer killed after storing payload and header, before TAIL."""
    ends.ring.words[ends.ring.data_offset // 8] = 5
    assert read(ends.readers[0]) is None


def test_a_view_cannot_change_what_other_readers_will_see(ends: Ends) -> None:
    ends.writer.try_write([b"shared"], 6)
    view = ends.readers[0].try_read()
    assert view is not None
    with pytest.raises(TypeError):
        view[0] = 0


def test_the_writer_rings_once_for_each_sleep(ends: Ends) -> None:
    bell = ends.doorbells[0]
    ends.writer.try_write([b"a"], 1)
    assert ends.rings(bell) == 0, "nobody sleeps"
    ends.readers[0].park()
    for _ in range(5):
        ends.writer.try_write([b"b"], 1)
    assert ends.rings(bell) == 1
    ends.readers[0].unpark()
    ends.writer.try_write([b"c"], 1)
    assert ends.rings(bell) == 0
    for _ in range(300):  # more sleeps than a byte can number
        ends.readers[0].park()
        ends.writer.try_write([b""], 0)
        assert ends.rings(bell) == 1
        ends.readers[0].unpark()
        while read(ends.readers[0]) is not None or read(ends.readers[1]) is not None:
            pass
    assert ends.rings(ends.doorbells[1]) == 0, "only who sleeps is rung"


def test_a_sleeping_writer_is_rung_by_each_reader_once_and_only_when_there_is_room(ends: Ends) -> None:
    while ends.writer.try_write([bytes(56)], 56):
        pass
    ends.writer.park()
    read(ends.readers[0])
    assert ends.rings(ends.room) == 0, "a quarter of the ring is asked for"
    while read(ends.readers[0]) is not None:
        pass
    assert ends.rings(ends.room) == 1
    while read(ends.readers[1]) is not None:
        pass
    assert ends.rings(ends.room) == 1
    ends.writer.unpark()
    assert ends.writer.try_write([bytes(56)], 56)
    read(ends.readers[0])
    assert ends.rings(ends.room) == 0


def test_level_readers_keep_the_working_set_small() -> None:
    ends = Ends(1, 16 << 20)
    touched = set()
    for _ in range(2000):
        assert ends.writer.try_write([bytes(60_000)], 60_000)
        view = ends.readers[0].try_read()
        assert view is not None
        touched.add(ends.readers[0].offset() >> 12)
        del view
        ends.readers[0].release()
    assert max(touched) << 12 < 1 << 20
    ends.close()


def test_sixty_four_readers(ends: Ends) -> None:
    many = Ends(64, 65536)
    for reader in many.readers[::3]:
        reader.park()
    assert many.writer.try_write([b"all"], 3)
    assert [many.rings(bell) for bell in many.doorbells] == [int(i % 3 == 0) for i in range(64)]
    assert all(read(reader) == b"all" for reader in many.readers)
    many.close()
    with pytest.raises(ValueError, match="64"):
        ShmRingBuffer.create(65, 4096)


def test_the_segment_cannot_be_truncated_under_a_reader(ends: Ends) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(ends.ring.fd, 4096)


def test_a_foreign_descriptor_is_not_taken_for_a_ring() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(TransportError, match="not a ring"):
        ShmRingBuffer.from_fd(fd)
    os.close(fd)


def test_without_memfd_the_file_has_lost_its_name_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise OSError(errno.ENOSYS, "no memfd here")

    monkeypatch.setattr(os, "memfd_create", missing)
    before = set(os.listdir("/dev/shm"))
    ends = Ends(1, 65536)
    assert set(os.listdir("/dev/shm")) == before
    assert ends.writer.try_write([b"works"], 5)
    assert read(ends.readers[0]) == b"works"
    other = ShmRingBuffer.from_fd(ends.ring.fd)
    assert other.capacity == 65536
    ends.close()


def test_no_memory_is_an_error_and_not_a_later_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match="cannot allocate"):
        ShmRingBuffer.create(1, 1 << 20)
