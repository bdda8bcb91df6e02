"""Every byte of every message, between real processes that are too many, too slow or hard to wake."""

from __future__ import annotations

import random

import pytest

from tests.transport_peers import peers, queue, send_all, start_readers


@pytest.mark.parametrize("wait", ["default", "few_cores", "lowest_latency"])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_every_byte_arrives_through_wraps_pauses_and_sleeps(n: int, wait: str) -> None:
    """Up to four times as many readers as cores here; sizes from nothing to several rings."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    sizes = [dice.choice((0, 1, 20, 300, 5000, 20_000)) for _ in range(3000)] + [100_000, 0, 300_000]
    dice.shuffle(sizes)
    with peers() as start, queue(n) as writer:
        readers = start_readers(start, writer, n, pause=2e-3, wait=wait)
        send_all(writer, sizes, pause=1e-3)
        writer.close()
        for reader in readers:
            result = reader.read()
            assert (result["count"], result["wrong"], result["error"]) == (len(sizes), 0, "QueueClosed")


def test_a_reader_that_raises_on_a_message_reads_the_later_ones_in_order() -> None:
    with peers() as start, queue(1) as writer:
        (reader,) = start_readers(start, writer, 1, raise_at=50, expect=200)
        send_all(writer, [100] * 200)
        assert reader.read() == {"raised": 50}
        result = reader.read()
        assert (result["count"], result["wrong"]) == (200, 0)


@pytest.mark.parametrize("wait", ["default", "few_cores"])
def test_with_every_wake_up_suppressed_all_messages_still_arrive_within_the_bound(wait: str) -> None:
    with peers() as start:
        writer = start(
            "writer", n_local=2, messages=300, sizes=[100], pause=0.1, suppress_wakes=True, wait=wait
        )
        handle = writer.read()["handle"]
        readers = [start("reader", handle=handle, rank=rank, wait=wait) for rank in range(2)]
        for reader in readers:
            reader.read()
            result = reader.read()
            assert (result["count"], result["wrong"], result["error"]) == (300, 0, "QueueClosed")
            assert result["longest_wait_s"] < 5


def test_a_busy_thread_in_the_reader_delays_but_stops_nothing() -> None:
    with peers() as start, queue(1) as writer:
        (reader,) = start_readers(start, writer, 1, threads=1)
        send_all(writer, [100] * 500)
        writer.close()
        result = reader.read()
        assert (result["count"], result["wrong"]) == (500, 0)
