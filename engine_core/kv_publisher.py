"""Publishes KV events over ZMQ in vLLM 0.33's format, on threads beside the step loop.

PUB socket: [topic][sequence number, 8 bytes big-endian][msgpack `KVEventBatch`]. Numbers count up from 0,
one per step that changed the cache. A batch that is dropped leaves a gap in them, so a subscriber knows that
it missed one.

ROUTER socket, if there is one: a request [empty][number, 8 bytes big-endian] is answered with a message
[empty][topic][number][batch] for each batch kept since that number, and [empty][empty][-1][empty] at the end.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from queue import Empty, SimpleQueue

import zmq

from engine_core.config import ConfigError
from engine_core.kv_encoding import BatchEncoder
from engine_core.kv_events import KVEventsConfig, RawEvent

logger = logging.getLogger("engine_core")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500  # for batches on their way to subscribers when the engine ends
# The thread works at most this often: what it does, it does under the interpreter's lock, and each time that
# it is woken the step loop may have to wait.
_PAUSE_S = 0.01


class ZmqEventPublisher:
    """One engine's publisher. `publish` never waits: the queue to the thread drops its oldest batch when
    full.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, data_parallel_rank: int = 0) -> None:
        """Opens the sockets and starts the threads. Raises ConfigError for an address that cannot be used."""
        self._encoder = BatchEncoder(block_size, data_parallel_rank)
        self._topic = config.topic.encode()
        self._max_queue_size = config.max_queue_size
        self._queue: SimpleQueue[tuple[int, float, list[RawEvent]] | None] = SimpleQueue()
        self._next_number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_lock = threading.Lock()
        self.num_dropped = 0  # batches, for want of room in the queue

        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(config.hwm)
            self.endpoint = _open(self._pub, "endpoint", config.endpoint, data_parallel_rank)
            self._replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if config.replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                # All that is kept and the end mark; twice, because acknowledgements arrive half a queue late.
                self._replay.sndhwm = 2 * (config.buffer_steps + 1)
                self.replay_endpoint = _open(
                    self._replay, "replay_endpoint", config.replay_endpoint, data_parallel_rank
                )
            self._stop_replay = self._context.socket(zmq.PAIR)
            self._stop_replay.bind("inproc://stop")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._threads = [threading.Thread(target=self._publish_all, name="kv-events", daemon=True)]
        if self._replay is not None:
            self._threads.append(
                threading.Thread(
                    target=self._serve_replays, args=(self._replay,), name="kv-replay", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    def publish(self, ts: float, events: list[RawEvent]) -> None:
        """Takes over a step's events (see `kv_events.Publisher`). From one thread only."""
        queue = self._queue
        if queue.qsize() >= self._max_queue_size:
            try:
                queue.get_nowait()
            except Empty:  # the thread has just caught up
                pass
            else:
                self.num_dropped += 1
        queue.put((self._next_number, ts, events))
        self._next_number += 1

    def close(self, timeout_s: float = 1.0) -> None:
        """Publishes what is queued, for at most `timeout_s`, and closes the sockets. Idempotent."""
        if self._context.closed:
            return
        self._queue.put(None)
        if self._replay is not None:
            self._stop_replay.send(b"")
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                logger.warning("KV events: the thread %s did not end within %g s", thread.name, timeout_s)
                return  # its sockets cannot be closed under it; they go with the process
        self._context.destroy(linger=_LINGER_MS)

    def _publish_all(self) -> None:
        try:
            self._publish_until_closed()
        except zmq.ZMQError:
            logger.exception("KV events stop here: the publisher's socket failed")

    def _publish_until_closed(self) -> None:
        queue = self._queue
        batch = queue.get()
        while batch is not None:
            self._send(*batch)
            try:
                batch = queue.get_nowait()
            except Empty:
                select.select((), (), (), _PAUSE_S)
                batch = queue.get()

    def _send(self, number: int, ts: float, events: list[RawEvent]) -> None:
        payload = self._encoder.encode(ts, events)
        with self._kept_lock:
            self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _serve_replays(self, replay: zmq.Socket[bytes]) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(replay, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        while stop not in (ready := dict(poller.poll())):
            if replay in ready:
                self._answer(replay, replay.recv_multipart())

    def _answer(self, replay: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            logger.warning("KV events: a replay request of %d frames makes no sense, ignored", len(request))
            return
        client = request[0]
        start = int.from_bytes(request[2], "big")
        with self._kept_lock:
            kept = [item for item in self._kept if item[0] >= start]
        for number, payload in kept:
            replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _open(socket: zmq.Socket[bytes], key: str, endpoint: str, rank: int) -> str:
    """Binds or connects, by vLLM's rule; each data-parallel rank has an address of its own. Returns the
    address.
    """
    address = _offset(endpoint, rank)
    bind = (
        "*" in address
        or "::" in address
        or address.startswith(("ipc://", "inproc://"))
        or socket.type == zmq.ROUTER
    )
    try:
        if not bind:
            socket.connect(address)
            return address
        socket.bind(address)
        return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    except zmq.ZMQError as error:
        raise ConfigError(f"kv_events_config.{key}", endpoint, f"cannot be opened: {error}") from error


def _offset(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://"):
        return f"{base}:{int(port) + rank}" if port.isdigit() and int(port) else endpoint
    return f"{endpoint}_dp{rank}"
