"""The other end of KV events: a copy of an engine's prefix-cache index, for routers.

`KVEventSubscriber` receives batches in order and heals gaps by replay; `KVCacheIndex` applies them. Both
work with vLLM's publisher, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_core.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEventBatch
from transport.clock import SYSTEM_CLOCK, Clock


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `first` to `last` are lost: they did not come, and the publisher does not have them any more.

    With `last` below `first`, whether any are lost is not known.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Another engine, with an empty cache, publishes at the address from now on."""


Item: TypeAlias = KVEventBatch | Gap | Restart


class KVEventSubscriber:
    """Batches of one publisher, each once and in order. Not thread-safe."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        replay_timeout_s: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Connects. Batches published before that are asked for at the first one that comes, like any gap."""
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.rcvhwm = 0
        self._sub.subscribe(topic.encode())
        self._disconnected = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._clock = clock
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._expected = 0  # number of the next batch
        self._last_ts = 0.0  # of the batch before it
        self._in_doubt = False  # whether the engine is still the one that sent it

    def poll(self, timeout_s: float) -> Iterator[Item]:
        """What has come, after waiting for at most `timeout_s` for the first.

        Ends when nothing more is there. Raises TimeoutError if a gap cannot be asked about now (the next
        call tries again), and msgspec.DecodeError for a batch that is none.
        """
        wait_ms = int(timeout_s * 1000)
        while self._sub.poll(wait_ms):
            wait_ms = 0
            _, number, payload = self._sub.recv_multipart()
            yield from self._take(int.from_bytes(number, "big"), self._decode(payload))

    def catch_up(self) -> Iterator[Item]:
        """Batches that have not come yet but were kept; nothing without a replay endpoint."""
        if self._replay_endpoint is not None:
            yield from self._bridge(None)

    def close(self) -> None:
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    def _take(self, number: int, batch: KVEventBatch) -> Iterator[Item]:
        while self._disconnected.poll(0):
            recv_monitor_message(self._disconnected)
            self._in_doubt = True
        if number < self._expected and batch.ts <= self._last_ts:
            return  # known from a replay
        if number != self._expected or self._in_doubt:
            if number < self._expected:
                yield self._restart()
            yield from self._bridge(number)
        yield self._accept(number, batch)

    def _bridge(self, end: int | None) -> Iterator[Item]:
        """From the last batch to that with the number `end`, or to the last one kept."""
        kept = self._replay(max(self._expected - 1, 0), end)
        if self._expected and kept and kept[0][0] == self._expected - 1:
            if kept[0][1].ts == self._last_ts:
                del kept[0]
            else:
                yield self._restart()
                kept = self._replay(0, end)
        elif self._expected and (kept or end is not None):
            # The last batch is not there to be compared with: it may have been another engine's.
            yield Gap(self._expected, (kept[0][0] if kept else end or 0) - 1)
            self._expected = kept[0][0] if kept else end or 0
        self._in_doubt = False
        for number, batch in kept:
            if number > self._expected:
                yield Gap(self._expected, number - 1)
            yield self._accept(number, batch)
        if end is not None and end > self._expected:
            yield Gap(self._expected, end - 1)

    def _accept(self, number: int, batch: KVEventBatch) -> KVEventBatch:
        self._expected = number + 1
        self._last_ts = batch.ts
        return batch

    def _restart(self) -> Restart:
        self._expected = 0
        return Restart()

    def _replay(self, start: int, end: int | None) -> list[tuple[int, KVEventBatch]]:
        """Batches kept from `start` to before `end`. Raises TimeoutError."""
        if self._replay_endpoint is None:
            return []
        kept: list[tuple[int, KVEventBatch]] = []
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.rcvhwm = 0
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            deadline = self._clock.monotonic() + self._replay_timeout_s
            while socket.poll(max(0, int(1000 * (deadline - self._clock.monotonic())))):
                _, _, number, payload = socket.recv_multipart()
                if not payload:
                    return kept
                if end is None or int.from_bytes(number, "big") < end:
                    kept.append((int.from_bytes(number, "big"), self._decode(payload)))
            raise TimeoutError(
                f"{self._replay_endpoint} did not replay KV events from number {start} on "
                f"within {self._replay_timeout_s:g} s"
            )
        finally:
            socket.close(linger=0)


class KVCacheIndex:
    """Which contents an engine's prefix cache holds, by block hash.

    After a gap it starts over: it never holds a content that is gone, but may lack some that are there
    (`complete` is false) until the engine clears its cache.
    """

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.complete = True

    def apply(self, item: Item) -> None:
        if not isinstance(item, KVEventBatch):
            self.hashes.clear()
            self.complete = isinstance(item, Restart)
            return
        for event in item.events:
            if isinstance(event, BlockStored):
                self.hashes.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.hashes.difference_update(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.hashes.clear()
                self.complete = True

    def num_hit_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Length of the prefix of `block_hashes` that the engine has, in blocks."""
        count = 0
        for block_hash in block_hashes:
            if block_hash not in self.hashes:
                break
            count += 1
        return count
