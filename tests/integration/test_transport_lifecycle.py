"""Readers that come late, stop, fork or idle; and what a queue needs of the machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.transport_peers import ROOT, message, packed, peers, queue, start_readers
from transport import MessageQueue, QueueFull, TransportTimeout, WaitPolicy


def test_a_stopped_reader_is_warned_about_then_named_at_the_deadline_and_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with peers() as start, queue(1, wait=WaitPolicy(warn_after_s=0.2)) as writer:
        (reader,) = start_readers(start, writer, 1)
        reader.signal(signal.SIGSTOP)
        number = 0
        with pytest.raises(QueueFull) as caught:
            while True:
                writer.enqueue(*message(number, 1000), timeout_s=1)
                number += 1
        assert (caught.value.rank, caught.value.pid) == (0, reader.pid)
        assert caught.value.lag_messages == number
        assert f"rank 0 (pid {reader.pid}) is {number} messages" in caplog.text
        reader.signal(signal.SIGCONT)
        for later in range(number, number + 100):  # the refused one again
            writer.enqueue(*message(later, 1000), timeout_s=20)
        writer.close()
        result = reader.read()
        assert (result["count"], result["wrong"]) == (number + 100, 0)


def test_readers_that_come_late_get_everything_and_a_missing_one_is_named() -> None:
    with peers() as start, queue(3) as writer:
        handle = packed(writer.handle())
        writer.enqueue(*message(0, 10), timeout_s=1)
        readers = [start("reader", handle=handle, rank=0), start("reader", handle=handle, rank=2, delay=2)]
        with pytest.raises(TransportTimeout) as caught:
            writer.wait_until_ready(1)
        assert 1 in caught.value.missing_ranks
        readers.append(start("reader", handle=handle, rank=1))
        writer.wait_until_ready(20)
        writer.enqueue(*message(1, 10), timeout_s=1)
        writer.close()
        for reader in readers:
            reader.read()
            result = reader.read()
            assert (result["count"], result["wrong"]) == (2, 0)


def test_a_reader_made_by_fork_attaches_like_any_other() -> None:
    with queue(1) as writer:
        handle = writer.handle()
        child = os.fork()
        if child == 0:
            try:
                with MessageQueue.attach(handle, 0, timeout_s=10) as reader:
                    os._exit(0 if reader.dequeue_copy(10) == b"hello" else 1)
            finally:
                os._exit(2)
        writer.wait_until_ready(10)
        writer.enqueue(b"hello", timeout_s=5)
        assert os.waitpid(child, 0)[1] == 0


def test_an_inherited_end_closed_in_a_forked_child_stays_open_in_the_parent() -> None:
    with queue(1) as writer, MessageQueue.attach(writer.handle(), 0, timeout_s=5) as reader:
        writer.wait_until_ready(5)
        child = os.fork()
        if child == 0:
            writer.close()
            reader.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.enqueue(b"still here", timeout_s=1)
        assert reader.dequeue_copy(1) == b"still here"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_with_the_token() -> None:
    with queue(1) as writer:
        handle = writer.handle()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.connect("\0" + handle.address)
                    connection.send(msgspec.msgpack.encode([1, handle.token, 0]))
                    os._exit(1 if connection.recv(4096) else 0)
            except ConnectionError:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        with MessageQueue.attach(handle, 0, timeout_s=5):
            writer.wait_until_ready(5)


def test_an_idle_reader_uses_no_cpu() -> None:
    with peers() as start, queue(1) as writer:
        (reader,) = start_readers(start, writer, 1, expect=1)
        started = time.monotonic()
        before = cpu_seconds(reader.pid)
        time.sleep(3)
        used = cpu_seconds(reader.pid) - before
        assert used / (time.monotonic() - started) < 0.02
        writer.enqueue(*message(0, 0), timeout_s=1)
        assert reader.read()["count"] == 1


def test_a_megabyte_of_dev_shm_is_enough_for_any_queue() -> None:
    code = (
        "import os; from transport import MessageQueue\n"
        "before = os.statvfs('/dev/shm').f_bfree\n"
        "q = MessageQueue.create(n_local=1, capacity_bytes=16 << 20)\n"
        "r = MessageQueue.attach(q.handle(), 0, timeout_s=5)\n"
        "q.enqueue(bytes(7 << 20), timeout_s=5)\n"
        "assert len(r.dequeue_copy(5)) == 7 << 20\n"
        "assert os.statvfs('/dev/shm').f_bfree == before\n"
        "print('fine')"
    )
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    probe = subprocess.run([*command[:5], "sh", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no mount namespaces here: {probe.stderr.strip()}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.stdout == "fine\n", done.stderr


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
