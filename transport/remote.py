"""Readers on other hosts: the same messages over TCP, by a ZMQ XPUB socket to XSUB sockets.

PUB/SUB alone drops what a slow subscriber cannot take, misses who is not there yet, and lets anybody
listen. So here

- a reader proves itself before it gets anything: by the queue's token, or by its CURVE key where encryption
is on; - its first subscription says who it is, so the writer counts its readers by name, and the end of
that subscription says
  who is gone, whether by a closed connection or by missing heartbeats;
- messages are numbered: a gap is an error and not a silence; - readers report what they have consumed, and
the writer never has more than a window of bytes on the way to any of them.

On the wire, writer to reader, one frame:     "D" | kind | 6 zero bytes | number (u64) | payload
or, to one reader that is not wanted:         its hello | reason
Reader to writer: subscriptions to "D" and to its hello, "H" | msgpack (nonce, rank, pid, host), and
                                              2 | nonce | messages (u64) | bytes (u64)      consumed since
                                              the start 3 | nonce                                     about
                                              to close
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from transport.clock import Clock
from transport.errors import (
    AttachRefused,
    Cancelled,
    MessageLost,
    QueueClosed,
    ReaderDied,
    TransportError,
    TransportTimeout,
    WriterDied,
)
from transport.message_queue import CurveKeys, Handle, Message, MessageQueue, QueueStats
from transport.waiting import Sleeper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.handover import Roster
    from transport.ring import Buffer

    Context = zmq.Context[zmq.Socket[bytes]]

logger = logging.getLogger("transport")

_HEADER = struct.Struct("<sB6xQ")
_CREDIT = struct.Struct("<B8sQQ")
_DATA, _CLOSE = 0, 1
_CONSUMED, _LEAVING = 2, 3
_MESSAGE_COST = 64  # what a message takes up besides its payload, so that empty ones count too
_ZERO_COPY_BYTES = 64 << 10
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000  # without an answer to a heartbeat, the other side is gone
_LINGER_MS = 2000  # for the last messages of a queue that is closed
_ZAP_DOMAIN = b"engine-core"


class _Hello(msgspec.Struct, array_like=True):
    nonce: bytes
    rank: int
    pid: int
    host: str


@dataclass(slots=True)
class _Reader:
    rank: int
    pid: int
    host: str
    messages: int = 0  # consumed since the start
    nbytes: int = 0
    leaving: bool = False


def _configure(sock: zmq.Socket[bytes], host: str) -> None:
    sock.ipv6 = ":" in host
    # No high-water mark, which would drop or block: the window bounds what is on the way.
    sock.sndhwm = sock.rcvhwm = 0
    sock.heartbeat_ivl = _HEARTBEAT_MS
    sock.heartbeat_timeout = sock.heartbeat_ttl = _SILENCE_MS
    sock.linger = 0


def _url(host: str, port: str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class RemoteReaders:
    """The writer's side. All but the doorkeeper's thread is called by the writer's thread only."""

    def __init__(
        self,
        name: str,
        host: str,
        n_readers: int,
        window: int,
        token: bytes,
        roster: Roster,
        curve: CurveKeys | None,
    ) -> None:
        self._name = name
        self._n_readers = n_readers
        self._window = window
        self._roster = roster
        self._readers: dict[bytes, _Reader] = {}  # by nonce
        self._messages = 0
        self._nbytes = 0
        self._context = zmq.Context()
        self._doorkeeper = _Doorkeeper(self._context, token, curve)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XPUB)
        _configure(self._socket, host)
        self._socket.xpub_verbose = True
        self._socket.xpub_nodrop = True
        self._socket.zap_domain = _ZAP_DOMAIN
        try:
            if curve is None:
                self._socket.plain_server = True
            else:
                self._socket.curve_server = True
                self._socket.curve_secretkey = curve.writer_secret.encode()
            self._socket.bind(_url(host, "*"))
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"queue {name!r} cannot listen on {host}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.fd = self._socket.fileno()

    def ranks(self) -> set[int]:
        return {reader.rank for reader in self._readers.values()}

    def is_complete(self) -> bool:
        return len(self._readers) == self._n_readers

    def has_room(self, nbytes: int) -> bool:
        """Whether a message fits into every reader's window. One larger than the window goes alone."""
        self.serve_if_due(nbytes)
        behind = self._nbytes - min([reader.nbytes for reader in self._readers.values()])
        return behind == 0 or behind + nbytes + _MESSAGE_COST <= self._window

    def serve_if_due(self, nbytes: int) -> None:
        """Look at what readers report when half of the window is used, and now and then."""
        if not self._messages & 63 or 2 * (self._nbytes - self._slowest().nbytes + nbytes) > self._window:
            self.serve()

    def send(self, parts: Sequence[Buffer], nbytes: int, kind: int = _DATA) -> None:
        """Never blocks: see `has_room`."""
        data = b"".join([_HEADER.pack(b"D", kind, self._messages), *parts])  # type: ignore[list-item]
        self._socket.send(data, 0, len(data) < _ZERO_COPY_BYTES)
        self._messages += 1
        self._nbytes += nbytes + _MESSAGE_COST

    def slowest(self) -> tuple[int, int, int, int]:
        """(rank, pid, messages behind, bytes behind) of the reader that has consumed least."""
        reader = self._slowest()
        return reader.rank, reader.pid, self._messages - reader.messages, self._nbytes - reader.nbytes

    def serve(self) -> None:
        """Take in what readers have said. Raises ReaderDied."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if data[:2] == b"\x01H":
                self._greet(data[1:])
            elif data[:2] == b"\x00H":
                hello = msgspec.msgpack.decode(data[2:], type=_Hello)
                reader = self._readers.get(hello.nonce)
                if reader is not None:
                    raise ReaderDied(
                        self._name, reader.rank, reader.pid, closed=reader.leaving, host=reader.host
                    )
            elif data[0] == _CONSUMED and len(data) == _CREDIT.size:
                _, nonce, messages, nbytes = _CREDIT.unpack(data)
                if nonce in self._readers:
                    self._readers[nonce].messages, self._readers[nonce].nbytes = messages, nbytes
            elif data[0] == _LEAVING and data[1:] in self._readers:
                self._readers[data[1:]].leaving = True

    def close(self) -> None:
        """Deliver what was sent, for a moment; then drop the connections."""
        if self._readers:
            self.send((), 0, _CLOSE)
        self._socket.close(_LINGER_MS)
        self._doorkeeper.close()
        self._context.term()

    def _slowest(self) -> _Reader:
        return min(self._readers.values(), key=lambda reader: reader.nbytes)

    def _greet(self, topic: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(topic[1:], type=_Hello)
        except msgspec.MsgspecError:
            return
        if self.is_complete():
            refused = "all its remote readers have attached"
        else:
            refused = self._roster.claim(hello.rank)
        if refused:
            who = f"rank {hello.rank} (pid {hello.pid} on {hello.host})"
            logger.warning("%s was not attached to queue %r: %s", who, self._name, refused)
            self._socket.send(topic + refused.encode())
        else:
            self._readers[hello.nonce] = _Reader(hello.rank, hello.pid, hello.host)


class _Doorkeeper:
    """A thread that answers ZMQ's question who may connect (ZAP, RFC 27)."""

    def __init__(self, context: Context, token: bytes, curve: CurveKeys | None) -> None:
        if curve is None:
            self._mechanism, self._credential = b"PLAIN", token.hex().encode()
        else:
            self._mechanism, self._credential = b"CURVE", zmq.utils.z85.decode(curve.reader_public)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._thread = threading.Thread(target=self._answer, name="transport-doorkeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        with self._socket:
            while self._stop not in dict(poller.poll()):
                version, request_id, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
                allowed = mechanism == self._mechanism and hmac.compare_digest(
                    credentials[-1], self._credential
                )
                if not allowed:
                    logger.warning("a connection from %s was refused: wrong credentials", address.decode())
                answer = [b"200", b"OK"] if allowed else [b"400", b"wrong token or key"]
                self._socket.send_multipart([version, request_id, *answer, b"", b""])


class RemoteReader(MessageQueue):
    """A reader's end over TCP. See `MessageQueue.attach`."""

    def __init__(self, handle: Handle, rank: int, *, timeout_s: float, clock: Clock) -> None:
        self.name = handle.name
        self.rank = rank
        if not handle.endpoint:
            raise AttachRefused(handle.name, rank, "it has no remote readers")
        if not 0 <= rank < handle.n_readers:
            raise AttachRefused(handle.name, rank, f"the queue has ranks 0 to {handle.n_readers - 1}")
        self._clock = clock
        self._handle = handle
        self._pid = os.getpid()
        self._nonce = secrets.token_bytes(8)
        self._message = Message(self._release)
        self._messages = 0
        self._payload_bytes = 0
        self._expected = 0
        self._holding = 0  # payload bytes of the message in the reader's hands
        self._consumed_messages = 0
        self._consumed_bytes = 0
        self._reported_bytes = 0
        self._waits = 0
        self._parks = 0
        self._waited_s = 0.0
        self._longest_wait_s = 0.0
        self._connected = False
        self._closed = False
        self._error: TransportError | None = None

        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.XSUB)
        _configure(self._socket, handle.endpoint.removeprefix("tcp://").rpartition(":")[0])
        if handle.curve_reader_secret:
            self._socket.curve_serverkey = handle.curve_writer_public.encode()
            self._socket.curve_publickey = handle.curve_reader_public.encode()
            self._socket.curve_secretkey = handle.curve_reader_secret.encode()
        else:
            self._socket.plain_username = b"reader"
            self._socket.plain_password = handle.token.hex().encode()
        self._hello = b"H" + msgspec.msgpack.encode(
            _Hello(self._nonce, rank, self._pid, socket.gethostname())
        )
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._sleeper = Sleeper(None, self._on_event, queue=handle.name)
        self._sleeper.watch(self._socket.fileno())
        self._sleeper.watch(self._monitor.fileno())
        # Before connecting, so that both are the first that the writer hears. Data first: the hello makes
        # it count us.
        self._socket.send(b"\x01D")
        self._socket.send(b"\x01" + self._hello)
        self._socket.connect(handle.endpoint)
        try:
            self._connect(timeout_s)
        except BaseException:
            self.close()
            raise

    def check_peers(self) -> None:
        self._raise_if_unusable()
        self._sleeper.sleep(0.0)
        self._look_at_connection()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def dequeue(self, timeout_s: float) -> Message:
        message = self._message
        if self._sleeper.cancelled or self._error is not None or message.is_held:
            self._raise_if_unusable()
        data = self._receive()
        if data is None:
            data = self._wait(timeout_s)
        self._holding = len(data) - _HEADER.size
        self._messages += 1
        self._payload_bytes += self._holding
        message.view = memoryview(data)[_HEADER.size :]
        return message

    def cancel(self) -> None:
        self._sleeper.cancel()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._error = QueueClosed(self.name, "this end")
        self._message.abandon()
        self._sleeper.close()
        if os.getpid() != self._pid:
            return  # sockets of a context that another process made
        if self._connected:
            self._socket.send(bytes([_LEAVING]) + self._nonce)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(_LINGER_MS if self._connected else 0)
        self._context.term()

    @property
    def stats(self) -> QueueStats:
        return QueueStats(
            messages=self._messages,
            payload_bytes=self._payload_bytes,
            waits=self._waits,
            parks=self._waits,
            waited_s=self._waited_s,
            longest_wait_s=self._longest_wait_s,
        )

    def _connect(self, timeout_s: float) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while not self._connected:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise TransportTimeout(
                    f"rank {self.rank} could not connect to queue {self.name!r} at {self._handle.endpoint} "
                    f"within {timeout_s:g} s",
                    queue=self.name,
                    waited_s=timeout_s,
                )
            self._sleeper.sleep(left)
            self._look_at_connection()

    def _receive(self) -> bytes | None:
        """The next message if it has come. Raises MessageLost, QueueClosed, AttachRefused."""
        try:
            data: bytes = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if data[:1] == b"H":
            self._error = AttachRefused(self.name, self.rank, data[len(self._hello) :].decode())
            raise self._error
        _, kind, number = _HEADER.unpack_from(data)
        if number != self._expected:
            self._error = MessageLost(self.name, self._expected, number)
            raise self._error
        self._expected += 1
        if kind == _CLOSE:
            self._error = QueueClosed(self.name, f"the writer (pid {self._handle.writer.pid})")
            raise self._error
        return data

    def _wait(self, timeout_s: float) -> bytes:
        start = self._clock.monotonic()
        deadline = start + timeout_s
        self._waits += 1
        try:
            while True:
                self._report()  # the writer may be waiting for just this
                # After the report, not before: a send takes in what has arrived, and then the descriptor
                # stays silent.
                data = self._receive()
                if data is not None:
                    return data
                if self._error is not None:
                    raise self._error.with_traceback(None)
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    raise TransportTimeout(
                        f"rank {self.rank} got nothing from the writer (pid {self._handle.writer.pid} on "
                        f"{self._handle.host}) of queue {self.name!r} within {timeout_s:g} s",
                        queue=self.name,
                        waited_s=timeout_s,
                    )
                self._sleeper.sleep(left)
                self._look_at_connection()
        finally:
            waited = self._clock.monotonic() - start
            self._waited_s += waited
            self._longest_wait_s = max(self._longest_wait_s, waited)

    def _release(self) -> None:
        self._consumed_messages += 1
        self._consumed_bytes += self._holding + _MESSAGE_COST
        if 4 * (self._consumed_bytes - self._reported_bytes) >= self._handle.window_bytes:
            self._report()

    def _report(self) -> None:
        if self._reported_bytes != self._consumed_bytes:
            self._reported_bytes = self._consumed_bytes
            self._socket.send(
                _CREDIT.pack(_CONSUMED, self._nonce, self._consumed_messages, self._consumed_bytes)
            )

    def _on_event(self, fd: int) -> None:
        """Both descriptors only say that something may have changed; `_receive` and `_look_at_connection`
        see what.
        """

    def _look_at_connection(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise AttachRefused(self.name, self.rank, "wrong token or key")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise AttachRefused(
                    self.name, self.rank, f"{self._handle.endpoint} does not speak the queue's protocol"
                )
            elif self._connected and self._error is None:
                self._error = WriterDied(self.name, self._handle.writer.pid, host=self._handle.host)

    def _raise_if_unusable(self) -> None:
        if self._sleeper.cancelled and not isinstance(self._error, QueueClosed):
            raise Cancelled(self.name)
        if self._message.is_held:
            raise TransportError(f"the previous message of queue {self.name!r} has not been released")
        if self._error is not None and not isinstance(self._error, WriterDied):
            raise self._error.with_traceback(None)
