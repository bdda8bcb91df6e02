"""`MessageQueue` with all its ends in one process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from transport import (
    AttachRefused,
    Cancelled,
    CurveKeys,
    Handle,
    MessageQueue,
    QueueClosed,
    QueueFull,
    ReaderDied,
    TransportError,
    TransportTimeout,
    WaitPolicy,
    WriterDied,
)

Make = Callable[..., tuple[MessageQueue, list[MessageQueue]]]


@pytest.fixture
def make() -> Iterator[Make]:
    """A writer and its readers, closed at the end."""
    made: list[MessageQueue] = []

    def build(n: int = 1, **kwargs: object) -> tuple[MessageQueue, list[MessageQueue]]:
        kwargs = {"capacity_bytes": 1 << 16, "name": "steps", **kwargs}
        writer = MessageQueue.create(n_local=n, **kwargs)  # type: ignore[arg-type]
        made.append(writer)
        readers = [MessageQueue.attach(writer.handle(), rank, timeout_s=5) for rank in range(n)]
        made.extend(readers)
        return writer, readers

    yield build
    for queue in made:
        queue.close()


@pytest.fixture
def lone_writer() -> Iterator[MessageQueue]:
    with MessageQueue.create(n_local=2, capacity_bytes=1 << 16, name="steps") as writer:
        yield writer


def test_all_readers_get_the_joined_parts_in_order(make: Make) -> None:
    writer, readers = make(3)
    writer.wait_until_ready(5)
    writer.enqueue(b"ab", bytearray(b"cd"), memoryview(b"ef"), np.frombuffer(b"gh", np.uint8), timeout_s=1)
    writer.enqueue(timeout_s=1)
    writer.enqueue(np.arange(4, dtype=np.int32), timeout_s=1)
    for reader in readers:
        assert reader.dequeue_copy(1) == b"abcdefgh"
        assert reader.dequeue_copy(1) == b""
        assert reader.dequeue_copy(1) == np.arange(4, dtype=np.int32).tobytes()


def test_a_late_reader_gets_the_first_message_too(lone_writer: MessageQueue) -> None:
    lone_writer.enqueue(b"first", timeout_s=1)
    for rank in (1, 0):
        with MessageQueue.attach(lone_writer.handle(), rank, timeout_s=5) as reader:
            assert reader.dequeue_copy(1) == b"first"


def test_the_handle_is_plain_data(make: Make) -> None:
    writer, _ = make()
    handle = writer.handle()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=Handle) == handle
    assert msgspec.json.decode(msgspec.json.encode(handle), type=Handle) == handle


def test_secrets_do_not_show_in_logs(make: Make) -> None:
    handle, keys = make()[0].handle(), CurveKeys.generate()
    assert repr(handle.token)[2:-1] not in repr(handle)
    assert keys.writer_secret not in repr(keys) and keys.reader_secret not in repr(keys)


def test_views_are_released_by_the_context_manager_even_when_the_reader_raises(make: Make) -> None:
    writer, (reader,) = make()
    for number in range(3):
        writer.enqueue(bytes([number]), timeout_s=1)
    with pytest.raises(LookupError), reader.dequeue(1) as message:
        assert message.view[0] == 0
        raise LookupError
    assert not message.is_held
    assert [reader.dequeue_copy(1), reader.dequeue_copy(1)] == [b"\1", b"\2"]


def test_a_message_must_be_released_before_the_next(make: Make) -> None:
    writer, (reader,) = make()
    writer.enqueue(b"a", timeout_s=1)
    message = reader.dequeue(1)
    with pytest.raises(TransportError, match="not been released"):
        reader.dequeue(1)
    message.release()
    message.release()
    with pytest.raises(TransportTimeout):
        reader.dequeue(0)


@pytest.mark.parametrize("timeout_s", [0, -1, 0.02])
def test_dequeue_ends_at_its_deadline_and_names_the_writer(make: Make, timeout_s: float) -> None:
    _, (reader,) = make()
    with pytest.raises(
        TransportTimeout, match=rf"rank 0 .* writer \(pid {os.getpid()}\) .*'steps'"
    ) as caught:
        reader.dequeue(timeout_s)
    assert caught.value.waited_s == timeout_s
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("timeout_s", [0, -1, 0.02])
def test_a_full_queue_names_the_slowest_reader_and_how_far_it_is_behind(make: Make, timeout_s: float) -> None:
    writer, (fast, slow) = make(2)
    writer.wait_until_ready(5)  # it knows them by pid
    sent = 0
    with pytest.raises(QueueFull, match="rank 1") as caught:
        while True:
            writer.enqueue(bytes(1000), timeout_s=timeout_s)
            sent += 1
            fast.dequeue_copy(1)
    full = caught.value
    assert (full.rank, full.pid, full.queue) == (1, os.getpid(), "steps")
    assert full.lag_messages == sent
    assert 1000 * sent < full.lag_bytes <= 1 << 16
    slow.dequeue_copy(1)
    writer.enqueue(b"again", timeout_s=1)


def test_a_full_queue_names_a_reader_that_never_attached(lone_writer: MessageQueue) -> None:
    with (
        MessageQueue.attach(lone_writer.handle(), 0, timeout_s=5) as reader,
        pytest.raises(QueueFull) as caught,
    ):
        while True:
            lone_writer.enqueue(bytes(1000), timeout_s=0.02)
            reader.dequeue_copy(1)
    assert (caught.value.rank, caught.value.pid) == (1, None)
    assert "rank 1, which never attached" in str(caught.value)


def test_waiting_for_readers_names_the_missing_ranks() -> None:
    with MessageQueue.create(n_local=4, capacity_bytes=1 << 16) as writer:
        readers = [MessageQueue.attach(writer.handle(), rank, timeout_s=5) for rank in (0, 2)]
        with pytest.raises(TransportTimeout, match="ranks 1, 3 did not attach") as caught:
            writer.wait_until_ready(0.05)
        assert caught.value.missing_ranks == (1, 3)
        readers += [MessageQueue.attach(writer.handle(), rank, timeout_s=5) for rank in (3, 1)]
        writer.wait_until_ready(5)
        for reader in readers:
            reader.close()


@pytest.mark.parametrize(
    ("change", "rank", "reason"),
    [
        ({"token": b"guess"}, 0, "wrong token"),
        ({}, 2, "ranks 0 to 1"),
        ({}, -1, "ranks 0 to 1"),
        ({"address": ""}, 0, "no local readers"),
        ({"address": "engine-core/0/none"}, 0, "nobody listens"),
    ],
)
def test_a_stranger_cannot_attach(
    lone_writer: MessageQueue, change: dict[str, object], rank: int, reason: str
) -> None:
    handle = msgspec.structs.replace(lone_writer.handle(), **change)
    with pytest.raises(AttachRefused, match=reason):
        MessageQueue.attach(handle, rank, timeout_s=5)
    with pytest.raises(TransportTimeout, match="ranks 0, 1"):
        lone_writer.wait_until_ready(0)


def test_a_rank_attaches_once_and_nobody_after_the_last(lone_writer: MessageQueue) -> None:
    with MessageQueue.attach(lone_writer.handle(), 0, timeout_s=5):
        with pytest.raises(AttachRefused, match="already"):
            MessageQueue.attach(lone_writer.handle(), 0, timeout_s=5)
        with (
            MessageQueue.attach(lone_writer.handle(), 1, timeout_s=5),
            pytest.raises(AttachRefused, match="all its readers have attached"),
        ):
            MessageQueue.attach(lone_writer.handle(), 1, timeout_s=5)


def test_noise_on_the_attach_socket_harms_nobody(lone_writer: MessageQueue) -> None:
    address = "\0" + lone_writer.handle().address
    for noise in (b"\xc1", b"x" * 4096, b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(address)
            if noise:
                stranger.send(noise)
    with MessageQueue.attach(lone_writer.handle(), 0, timeout_s=5) as reader:
        lone_writer.enqueue(b"fine", timeout_s=1)
        assert reader.dequeue_copy(1) == b"fine"


def test_attaching_to_a_process_that_is_gone_says_so(lone_writer: MessageQueue) -> None:
    handle = lone_writer.handle()
    ended = msgspec.structs.replace(handle.writer, start_ticks=handle.writer.start_ticks - 1)
    with pytest.raises(WriterDied):
        MessageQueue.attach(msgspec.structs.replace(handle, writer=ended), 0, timeout_s=5)


def test_cancel_ends_a_waiting_dequeue_and_every_later_one(make: Make) -> None:
    _, (reader,) = make()
    timer = threading.Timer(0.05, reader.cancel)
    timer.start()
    for _ in range(2):
        with pytest.raises(Cancelled, match="steps"):
            reader.dequeue(30)
    timer.join()


def test_cancel_ends_a_waiting_enqueue_and_every_later_one(make: Make) -> None:
    writer, _ = make()
    timer = threading.Timer(0.05, writer.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        while True:
            writer.enqueue(bytes(10_000), timeout_s=30)
    with pytest.raises(Cancelled):
        writer.enqueue(b"", timeout_s=30)
    timer.join()


def test_cancel_ends_waiting_for_readers(lone_writer: MessageQueue) -> None:
    timer = threading.Timer(0.05, lone_writer.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        lone_writer.wait_until_ready(30)
    timer.join()


def test_what_was_sent_before_close_is_read_before_the_reader_hears_of_it(make: Make) -> None:
    writer, (reader,) = make()
    writer.enqueue(b"last", timeout_s=1)
    writer.close()
    writer.close()
    assert reader.dequeue_copy(1) == b"last"
    for _ in range(2):
        with pytest.raises(QueueClosed, match="by the writer"):
            reader.dequeue(5)
    with pytest.raises(QueueClosed, match="this end"):
        writer.enqueue(b"", timeout_s=1)


def test_cancel_after_close_touches_no_descriptor(make: Make) -> None:
    writer, (reader,) = make()
    for queue in (writer, reader):
        queue.close()
        others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(20)]  # the numbers that were given back
        queue.cancel()
        for fd in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
            os.close(fd)


def test_close_wakes_a_sleeping_reader(make: Make) -> None:
    writer, (reader,) = make()
    timer = threading.Timer(0.1, writer.close)
    timer.start()
    with pytest.raises(QueueClosed):
        reader.dequeue(30)
    timer.join()


def test_a_reader_that_closes_is_an_error_to_the_writer(make: Make) -> None:
    writer, readers = make(2)
    writer.wait_until_ready(5)
    readers[1].close()
    readers[1].close()
    for _ in range(2):
        with pytest.raises(ReaderDied, match=r"rank 1 .* closed its end") as caught:
            for _ in range(100):
                writer.enqueue(b"", timeout_s=1)
        assert caught.value.closed
    with pytest.raises(ReaderDied):
        writer.check_peers()
    with pytest.raises(QueueClosed):
        readers[1].dequeue(1)


def test_each_end_refuses_the_other_ends_calls(make: Make) -> None:
    writer, (reader,) = make()
    with pytest.raises(TransportError, match="writes"):
        writer.dequeue(1)
    for call in (reader.handle, lambda: reader.enqueue(b"", timeout_s=1), lambda: reader.wait_until_ready(1)):
        with pytest.raises(TransportError, match="reads"):
            call()


def test_who_only_looks_hears_of_the_writers_end(make: Make) -> None:
    writer, (reader,) = make(1)
    writer.enqueue(b"last", timeout_s=1)
    writer.close()
    assert reader.dequeue_copy(0) == b"last"
    deadline = time.monotonic() + 5
    with pytest.raises(QueueClosed):
        while time.monotonic() < deadline:
            with contextlib.suppress(TransportTimeout):
                reader.dequeue_copy(0)


def test_an_empty_array_is_a_part_of_a_message_larger_than_the_ring(make: Make) -> None:
    writer, (reader,) = make(1, capacity_bytes=4096)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(reader.dequeue_copy, 10)
        writer.enqueue(b"x" * 20_000, np.empty((0, 3), np.float32), b"tail", timeout_s=10)
        assert got.result() == b"x" * 20_000 + b"tail"


def test_a_message_larger_than_the_ring_arrives_whole_and_in_order(make: Make) -> None:
    writer, readers = make(2)
    sent = [os.urandom(size) for size in (10, 300_000, 32_760, 32_761, 1 << 20, 0, 16_384)]

    def send() -> None:
        for data in sent:
            writer.enqueue(data[:7], data[7:], timeout_s=20)

    def receive(reader: MessageQueue) -> list[bytes]:
        got = []
        for _ in sent:
            with reader.dequeue(20) as message:
                got.append(bytes(message.view))
                assert np.frombuffer(message.view, np.uint8).ctypes.data % 8 == 0
        return got

    with ThreadPoolExecutor(3) as threads:
        threads.submit(send)
        assert list(threads.map(receive, readers)) == [sent, sent]


def test_a_large_message_that_misses_its_deadline_is_dropped_whole(make: Make) -> None:
    writer, (reader,) = make()
    with pytest.raises(QueueFull):
        writer.enqueue(bytes(1 << 20), timeout_s=0.05)
    with pytest.raises(TransportTimeout):
        reader.dequeue(0.05)
    writer.enqueue(b"next", timeout_s=1)
    assert reader.dequeue_copy(1) == b"next"


def test_a_reader_that_keeps_the_writer_waiting_is_named_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    writer, _ = make(wait=WaitPolicy(warn_after_s=0.05))
    with caplog.at_level(logging.WARNING, "transport"), pytest.raises(QueueFull):
        while True:
            writer.enqueue(bytes(1000), timeout_s=0.4)
    warnings = [r.getMessage() for r in caplog.records]
    assert 2 <= len(warnings) <= 4, "at 0.05, 0.1, 0.2 s"
    assert f"rank 0 (pid {os.getpid()}) is 64 messages (65536 bytes) behind" in warnings[0]


def test_counters_can_be_read_at_any_time(make: Make) -> None:
    writer, (reader,) = make()
    for _ in range(5):
        writer.enqueue(b"abc", timeout_s=1)
        reader.dequeue_copy(1)
    with pytest.raises(TransportTimeout):
        reader.dequeue(0.05)
    assert (writer.stats.messages, writer.stats.payload_bytes) == (5, 15)
    stats = reader.stats
    assert (stats.messages, stats.payload_bytes, stats.waits, stats.parks) == (5, 15, 1, 1)
    assert stats.longest_wait_s >= 0.05


def test_no_descriptor_is_left_open_after_close(make: Make) -> None:
    def descriptors() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        return [name for name in found if name.startswith(("socket:", "anon_inode:", "/memfd:"))]

    before = len(descriptors())
    for _ in range(3):
        writer = MessageQueue.create(n_local=3, capacity_bytes=1 << 16)
        readers = [MessageQueue.attach(writer.handle(), rank, timeout_s=5) for rank in (0, 1)]
        writer.enqueue(b"x", timeout_s=1)
        for queue in (writer, *readers):
            queue.close()
        del writer, readers, queue
    assert len(descriptors()) == before


def test_dequeued_arrays_outlive_close_safely(make: Make) -> None:
    writer, (reader,) = make()
    writer.enqueue(np.arange(1000), timeout_s=1)
    array = np.frombuffer(reader.dequeue(1).view, np.int64)
    reader.close()
    writer.close()
    del reader, writer
    time.sleep(0.01)
    assert array.sum() == 499500


def test_a_reader_that_makes_room_too_slowly_does_not_hold_the_writer_beyond_its_deadline(make: Make) -> None:
    writer, (reader,) = make()
    with pytest.raises(QueueFull):
        while True:
            writer.enqueue(bytes(56), timeout_s=0)
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(1e-3):
            reader.dequeue_copy(1)

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    with pytest.raises(QueueFull):
        writer.enqueue(bytes(30_000), timeout_s=0.1)  # room for it takes half a second
    assert time.monotonic() - started < 0.4
    stop.set()
    thread.join()


def test_a_dead_readers_error_does_not_grow_when_raised_again(make: Make) -> None:
    writer, (reader,) = make()
    writer.wait_until_ready(5)
    reader.close()
    depths = []
    for _ in range(5):
        with pytest.raises(ReaderDied) as caught:
            for _ in range(100):
                writer.enqueue(b"", timeout_s=1)
        depths.append(len(caught.traceback))
    assert depths[-1] == depths[1]


def test_sixty_four_readers_and_no_more(make: Make) -> None:
    writer, readers = make(64)
    writer.wait_until_ready(5)
    for number in range(20):
        writer.enqueue(bytes([number]) * 1000, timeout_s=1)
        assert [reader.dequeue_copy(1) for reader in readers] == [bytes([number]) * 1000] * 64
    with pytest.raises(ValueError, match="64"):
        MessageQueue.create(n_local=65)
