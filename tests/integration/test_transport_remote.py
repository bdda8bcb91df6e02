"""Readers over TCP get what the local ones get; who is slow, gone or a stranger is told by name."""

from __future__ import annotations

import random
import signal
import socket
import time

import msgspec
import pytest
import zmq

from tests.transport_peers import message, packed, peers
from transport import (
    AttachRefused,
    Cancelled,
    CurveKeys,
    MessageLost,
    MessageQueue,
    QueueFull,
    ReaderDied,
    TransportTimeout,
    remote,
)

HOSTS = ["127.0.0.1", "::1"]


def queue(n_local: int, n_remote: int, host: str = "127.0.0.1", **kwargs: object) -> MessageQueue:
    kwargs = {"capacity_bytes": 1 << 16, "name": "test", **kwargs}
    return MessageQueue.create(n_local=n_local, n_remote=n_remote, remote_host=host, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("encrypted", [False, True])
def test_remote_and_local_readers_get_the_same_bytes_in_the_same_order(host: str, encrypted: bool) -> None:
    dice = random.Random(3)
    sizes = [dice.choice((0, 1, 300, 5000, 20_000, 70_000, 300_000)) for _ in range(600)]
    keys = CurveKeys.generate() if encrypted else None
    with peers() as start, queue(1, 2, host, curve=keys) as writer:
        handle = packed(writer.handle())
        readers = [
            start("reader", handle=handle, rank=0, pause=1e-3),
            start("reader", handle=handle, rank=1, pause=1e-3, remote=True),
            start("reader", handle=handle, rank=2, remote=True),
        ]
        writer.wait_until_ready(20)
        for number, size in enumerate(sizes):
            writer.enqueue(*message(number, size), timeout_s=20)
        writer.close()
        for reader in readers:
            reader.read()
            result = reader.read()
            assert (result["count"], result["wrong"], result["error"]) == (600, 0, "QueueClosed"), result
        assert sum(sizes) + 16 * 600 == result["nbytes"]


def test_the_first_message_waits_for_the_second_subscriber_that_comes_two_seconds_late() -> None:
    with peers() as start, queue(0, 2) as writer:
        handle = packed(writer.handle())
        readers = [start("reader", handle=handle, rank=rank, remote=True, delay=2 * rank) for rank in (0, 1)]
        with pytest.raises(TransportTimeout, match=r"rank 1|ranks 0, 1") as caught:
            writer.enqueue(*message(0, 10), timeout_s=1)
        assert 1 in caught.value.missing_ranks
        for number in range(50):
            writer.enqueue(*message(number, 10), timeout_s=20)
        writer.close()
        for reader in readers:
            reader.read()
            result = reader.read()
            assert (result["count"], result["wrong"]) == (50, 0)


def test_a_stopped_remote_reader_stops_the_writer_without_a_loss_and_with_bounded_memory() -> None:
    with peers() as start, queue(0, 1, capacity_bytes=1 << 20) as writer:
        reader = start("reader", handle=packed(writer.handle()), rank=0, remote=True)
        writer.wait_until_ready(20)
        reader.read()
        reader.signal(signal.SIGSTOP)
        number = 0
        with pytest.raises(QueueFull, match="rank 0") as caught:
            while number < 100_000:
                writer.enqueue(*message(number, 10_000), timeout_s=0.5)
                number += 1
        assert caught.value.pid == reader.pid
        assert caught.value.lag_messages == number
        assert number * 10_000 <= 1 << 20
        reader.signal(signal.SIGCONT)
        for later in range(number, number + 300):  # the refused one again
            writer.enqueue(*message(later, 10_000), timeout_s=20)
        writer.close()
        result = reader.read()
        assert (result["count"], result["wrong"], result["error"]) == (number + 300, 0, "QueueClosed")


def test_messages_larger_than_the_window_go_one_by_one() -> None:
    with peers() as start, queue(1, 1) as writer:
        handle = packed(writer.handle())
        readers = [start("reader", handle=handle, rank=rank, remote=bool(rank)) for rank in (0, 1)]
        for number in range(10):
            writer.enqueue(*message(number, 500_000 * (number % 3)), timeout_s=20)
        writer.close()
        for reader in readers:
            reader.read()
            result = reader.read()
            assert (result["count"], result["wrong"]) == (10, 0)


def test_a_killed_remote_reader_is_named() -> None:
    with peers() as start, queue(0, 2) as writer:
        handle = packed(writer.handle())
        readers = [start("reader", handle=handle, rank=rank, remote=True) for rank in (0, 1)]
        writer.wait_until_ready(20)
        readers[1].signal(signal.SIGSTOP)
        for number in range(3):
            writer.enqueue(*message(number, 10), timeout_s=5)
        readers[1].kill()
        with pytest.raises(ReaderDied, match="rank 1") as caught:
            for number in range(3, 100_000):
                writer.enqueue(*message(number, 1000), timeout_s=20)
        assert (caught.value.rank, caught.value.pid) == (1, readers[1].pid)
        assert caught.value.host == socket.gethostname()
        with pytest.raises(ReaderDied):
            writer.check_peers()


def test_a_killed_writer_ends_a_remote_dequeue_after_the_last_message() -> None:
    with peers() as start:
        writer = start(
            "writer", n_local=0, n_remote=1, remote_host="127.0.0.1", messages=10, sizes=[10], close=False
        )
        reader = start("reader", handle=writer.read()["handle"], rank=0, remote=True)
        reader.read(), writer.read(), writer.read()
        time.sleep(0.3)
        killed = time.monotonic()
        writer.kill()
        result = reader.read()
        assert (result["count"], result["wrong"], result["error"]) == (10, 0, "WriterDied")
        assert str(writer.pid) in result["text"]
        assert result["at"] - killed < 3


def test_a_remote_reader_that_closes_is_an_error_to_the_writer() -> None:
    with queue(0, 1) as writer:
        reader = MessageQueue.attach(writer.handle(), 0, remote=True, timeout_s=5)
        writer.enqueue(b"x", timeout_s=5)
        reader.close()
        reader.close()
        with pytest.raises(ReaderDied, match="closed its end") as caught:
            for _ in range(100):
                writer.check_peers()
                time.sleep(0.02)
        assert caught.value.closed


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_stranger_gets_nothing(encrypted: bool) -> None:
    keys = CurveKeys.generate() if encrypted else None
    with queue(0, 1, curve=keys) as writer:
        handle = writer.handle()
        other = CurveKeys.generate()
        stranger = msgspec.structs.replace(
            handle,
            token=b"guess",
            curve_reader_public=other.reader_public if encrypted else "",
            curve_reader_secret=other.reader_secret if encrypted else "",
        )
        with pytest.raises(AttachRefused, match="wrong token or key"):
            MessageQueue.attach(stranger, 0, remote=True, timeout_s=5)
        with zmq.Context() as context, context.socket(zmq.SUB) as plain:
            plain.linger = 0
            plain.subscribe(b"")
            plain.connect(handle.endpoint)
            with MessageQueue.attach(handle, 0, remote=True, timeout_s=5) as reader:
                writer.enqueue(b"secret", timeout_s=5)
                assert reader.dequeue_copy(5) == b"secret"
                assert not plain.poll(200)


def test_a_rank_attaches_once_over_all_ways() -> None:
    with queue(1, 1) as writer, MessageQueue.attach(writer.handle(), 0, timeout_s=5):
        with MessageQueue.attach(writer.handle(), 0, remote=True, timeout_s=5) as second:
            with pytest.raises(TransportTimeout, match="rank 1"):
                writer.wait_until_ready(0.3)
            with pytest.raises(AttachRefused, match="already"):
                second.dequeue(5)
        with pytest.raises(AttachRefused, match="ranks 0 to 1"):
            MessageQueue.attach(writer.handle(), 2, remote=True, timeout_s=5)
        with MessageQueue.attach(writer.handle(), 1, remote=True, timeout_s=5) as right:
            writer.enqueue(b"x", timeout_s=5)
            assert right.dequeue_copy(5) == b"x"


def test_a_queue_without_remote_readers_refuses_them() -> None:
    with MessageQueue.create(n_local=1, capacity_bytes=1 << 16) as writer:
        with pytest.raises(AttachRefused, match="no remote readers"):
            MessageQueue.attach(writer.handle(), 0, remote=True, timeout_s=5)
        with pytest.raises(ValueError, match="remote_host"):
            MessageQueue.create(n_local=0, n_remote=1)


def test_a_gap_in_the_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with queue(0, 1) as writer, MessageQueue.attach(writer.handle(), 0, remote=True, timeout_s=5) as reader:
        writer.enqueue(b"0", timeout_s=5)
        pack = remote._HEADER.pack

        class Skipping:
            size = remote._HEADER.size
            unpack_from = staticmethod(remote._HEADER.unpack_from)

            @staticmethod
            def pack(tag: bytes, kind: int, number: int) -> bytes:
                return pack(tag, kind, number + 3)

        monkeypatch.setattr(remote, "_HEADER", Skipping)
        writer.enqueue(b"4", timeout_s=5)
        assert reader.dequeue_copy(5) == b"0"
        with pytest.raises(MessageLost, match="lost 3 messages") as caught:
            reader.dequeue(5)
        assert (caught.value.expected, caught.value.received) == (1, 4)
        with pytest.raises(MessageLost):
            reader.dequeue(5)


def test_deadlines_and_cancel_hold_for_remote_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with queue(0, 1) as writer, MessageQueue.attach(writer.handle(), 0, remote=True, timeout_s=5) as reader:
        writer.wait_until_ready(5)
        for timeout_s in (0, -1, 0.05):
            with pytest.raises(TransportTimeout, match="rank 0"):
                reader.dequeue(timeout_s)
        for end in (writer, reader):
            end.cancel()
        with pytest.raises(Cancelled):
            reader.dequeue(30)
        with pytest.raises(Cancelled):
            writer.enqueue(b"", timeout_s=30)


def test_an_address_that_is_not_ours_is_refused() -> None:
    from transport import TransportError

    with pytest.raises(TransportError, match=r"cannot listen on 203\.0\.113\.1"):
        queue(0, 1, "203.0.113.1")
