"""Queues between real processes, one of which dies: the others hear of it, and by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.transport_peers import message, packed, peers, queue, start_readers
from transport import ReaderDied


def test_a_killed_reader_ends_a_waiting_enqueue_at_once_and_is_named() -> None:
    with peers() as start, queue(2) as writer:
        readers = start_readers(start, writer, 2)
        readers[1].signal(signal.SIGSTOP)
        killer = subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(1); os.kill({readers[1].pid}, 9)"]
        )
        with pytest.raises(ReaderDied) as caught:
            for number in range(10_000):
                writer.enqueue(*message(number, 1000), timeout_s=20)
        assert killer.wait() == 0
        assert (caught.value.rank, caught.value.pid, caught.value.closed) == (1, readers[1].pid, False)
        with pytest.raises(ReaderDied):
            writer.enqueue(b"", timeout_s=1)


def test_a_killed_reader_is_noticed_although_there_is_room() -> None:
    with peers() as start, queue(1, 1 << 20) as writer:
        (reader,) = start_readers(start, writer, 1)
        reader.kill()
        with pytest.raises(ReaderDied):
            for _ in range(200):
                writer.enqueue(b"x", timeout_s=1)


@pytest.mark.parametrize("fork", [False, True])
def test_a_killed_writer_ends_a_waiting_dequeue_within_50_ms(fork: bool) -> None:
    """Also if a forked child of the writer, and one of the reader, still holds the sockets."""
    with peers() as start:
        writer = start("writer", n_local=1, messages=10, sizes=[10], close=False, fork=fork)
        reader = start("reader", handle=writer.read()["handle"], rank=0, fork=fork)
        children = [reader.read()["child"], writer.read()["child"]]
        writer.read()
        time.sleep(0.5)
        killed = time.monotonic()
        writer.kill()
        result = reader.read()
        for child in filter(None, children):
            os.kill(child, signal.SIGKILL)
        assert (result["count"], result["wrong"], result["error"]) == (10, 0, "WriterDied")
        assert str(writer.pid) in result["text"]
        assert result["at"] - killed < 1.0, "a kernel notice, not a time-out of 20 s"


def test_a_killed_writer_ends_a_spinning_dequeue_too() -> None:
    with peers() as start:
        writer = start("writer", n_local=1, messages=10, sizes=[10], close=False)
        reader = start("reader", handle=writer.read()["handle"], rank=0, wait="lowest_latency")
        reader.read(), writer.read(), writer.read()
        killed = time.monotonic()
        writer.kill()
        result = reader.read()
        assert result["error"] == "WriterDied"
        assert result["at"] - killed < 0.9, "the spin lasts a second"


def test_a_reader_that_dies_while_others_are_awaited_is_named() -> None:
    with peers() as start, queue(2) as writer:
        reader = start("reader", handle=packed(writer.handle()), rank=0)
        reader.read()
        reader.kill()
        with pytest.raises(ReaderDied, match="rank 0"):
            writer.wait_until_ready(20)


def test_killing_the_whole_group_leaves_no_name_behind() -> None:
    def names(pid: int) -> list[str]:
        """Sockets and shared memory that carry a process's number."""
        sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if f"/{pid}/" in line]
        return sockets + [name for name in os.listdir("/dev/shm") if str(pid) in name]

    with peers() as start:
        writer = start("writer", n_local=3, messages=10**9, sizes=[100, 5000])
        handle = writer.read()["handle"]
        assert names(writer.pid), "it listens for its readers"
        group = [writer, *(start("reader", handle=handle, rank=rank) for rank in range(3))]
        writer.read()
        time.sleep(0.2)
        for peer in group:
            peer.signal(signal.SIGKILL)
        for peer in group:
            peer.process.wait()
            assert names(peer.pid) == []
