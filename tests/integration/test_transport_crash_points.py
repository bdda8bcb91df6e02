"""A process is killed at each line of the ring's code in turn."""

from __future__ import annotations

import signal

import pytest

from tests.transport_peers import message, packed, peers, queue
from transport import ReaderDied


@pytest.mark.parametrize("first_line", range(0, 24, 6))
def test_a_writer_killed_at_any_point_of_publishing_tears_nothing(first_line: int) -> None:
    """At each line of the ring's code in turn; every reader gets all that was published, whole, and then
    WriterDied.
    """
    with peers() as start:
        for line in range(first_line, first_line + 6):
            writer = start(
                "writer", n_local=2, messages=60, sizes=[3000, 40_000], kill_at_message=50, kill_at_line=line
            )
            handle = writer.read()["handle"]
            readers = [start("reader", handle=handle, rank=rank) for rank in range(2)]
            for reader in readers:
                reader.read()
                result = reader.read()
                assert (result["wrong"], result["error"]) == (0, "WriterDied"), result
                assert result["count"] in (50, 51, 52, 53), result
            assert writer.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("first_line", range(0, 24, 6))
def test_a_reader_killed_at_any_point_of_reading_is_named_and_hurts_nobody_else(first_line: int) -> None:
    with peers() as start:
        for line in range(first_line, first_line + 6):
            with queue(2) as writer:
                handle = packed(writer.handle())
                victim = start("reader", handle=handle, rank=0, kill_at_message=20, kill_at_line=line)
                other = start("reader", handle=handle, rank=1)
                writer.wait_until_ready(20)
                sent = 0
                with pytest.raises(ReaderDied) as caught:
                    while True:
                        writer.enqueue(*message(sent, 3000), timeout_s=20)
                        sent += 1
                assert (caught.value.rank, caught.value.pid) == (0, victim.pid)
                writer.close()
                other.read()
                result = other.read()
                assert (result["count"], result["wrong"], result["error"]) == (sent, 0, "QueueClosed")
