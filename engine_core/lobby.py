"""The engine's side of the lobby: clients join, leave, and hear how the engine ended.

One thread, which sleeps unless somebody comes or goes; the step loop never waits for it. It dials a new
client's sockets itself and hands them over ready for use.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from engine_core.errors import EngineCoreError, HandshakeError, ProtocolError
from engine_core.lobby_protocol import (
    Ended,
    Greeting,
    Join,
    Joined,
    Message,
    MessageReader,
    Stop,
    frame,
    peer_uid,
    stream_socket,
    watch_peer_host,
)
from engine_core.protocol import ReadyResponse
from engine_core.sockets import ClientSockets, Context, connect_client
from transport.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger("engine_core")

JOIN_TIMEOUT_S = 10.0  # from the greeting to `join`
ACCEPT_PAUSE_S = 1.0  # after a client could not be let in
MAX_STREAMS = 1024


class LobbyError(EngineCoreError):
    """The lobby's address cannot be used."""


@dataclass(frozen=True, slots=True)
class ClientJoined:
    client: ClientSockets


@dataclass(frozen=True, slots=True)
class ClientLeft:
    client_index: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """By the launcher, or by its death."""

    reason: str


Event = ClientJoined | ClientLeft | StopAsked


@dataclass(eq=False, slots=True)
class _Stream:
    socket: socket.socket
    is_launcher: bool = False
    reader: MessageReader = field(default_factory=MessageReader)
    client: ClientSockets | None = None
    join_by: float | None = None  # deadline on the monotonic clock


class Lobby:
    """Opened before the engine starts, so that an address in use is found at once; greets once it serves."""

    def __init__(
        self,
        address: str | None,
        launcher: socket.socket | None,
        on_event: Callable[[Event], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`on_event` is called from the lobby's thread. Raises `LobbyError`."""
        self.address = address
        self._on_event = on_event
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # for _streams and what is written to them
        self._streams: set[_Stream] = set()
        self._greeting: bytes | None = None
        self._registration: ReadyResponse | None = None
        self._context: Context | None = None
        self._next_index = 0
        self._ended = False
        self._accept_at: float | None = None  # on the monotonic clock; None: whenever somebody comes
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, "wake")
        self._listener = _listen(address) if address is not None else None
        if launcher is not None:
            self._add(launcher, is_launcher=True)
        self._thread = threading.Thread(target=self._run, name="lobby", daemon=True)
        self._thread.start()

    def open(self, context: Context, registration: ReadyResponse, first_client_index: int) -> None:
        """The engine serves: greet whoever waits and whoever comes."""
        greeting = Greeting(pid=os.getpid(), lobby=self.address, ready=registration)
        with self._lock:
            self._context = context
            self._registration = registration
            self._next_index = first_client_index
            self._greeting = frame(greeting)
            for stream in list(self._streams):
                self._greet(stream)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._wake()

    def close(self, cause: str, *, crashed: bool = False) -> None:
        """Tell everybody why, and end. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            for stream in self._streams:
                self._write(stream, Ended(cause, crashed))
        self._wake()
        self._thread.join()
        for stream in self._streams:
            stream.socket.close()
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        if self._listener is not None:
            path = self._listener.getsockname()
            self._listener.close()
            if isinstance(path, str) and path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _wake(self) -> None:
        os.write(self._wake_writer, b"x")

    # The thread

    def _run(self) -> None:
        while True:
            events = self._selector.select(self._seconds_to_deadline())
            with self._lock:
                if self._ended:
                    return
            for key, _ in events:
                if key.data == "wake":
                    os.read(self._wake_reader, 64)
                elif key.data == "listener":
                    self._accept()
                else:
                    self._read(key.data)
            self._drop_late_joiners()
            self._resume_accepting()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [stream.join_by for stream in self._streams if stream.join_by is not None]
        if self._accept_at is not None:
            deadlines.append(self._accept_at)
        return max(0.0, min(deadlines) - self._clock.monotonic()) if deadlines else None

    def _drop_late_joiners(self) -> None:
        now = self._clock.monotonic()
        for stream in [s for s in self._streams if s.join_by is not None and s.join_by <= now]:
            self._refuse(stream, f"no join within {JOIN_TIMEOUT_S:g} s")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # the client is gone again, or we are out of descriptors
            logger.warning("a client could not be let in: %s", error.strerror or error)
            # It still waits to be accepted, and would wake us again at once.
            self._selector.unregister(self._listener)
            self._accept_at = self._clock.monotonic() + ACCEPT_PAUSE_S
            return
        stream = self._add(peer)
        refusal = _refusal(peer) if len(self._streams) <= MAX_STREAMS else "too many clients"
        if refusal is not None:
            self._refuse(stream, refusal)
            return
        with self._lock:
            self._greet(stream)

    def _resume_accepting(self) -> None:
        if self._accept_at is not None and self._accept_at <= self._clock.monotonic():
            assert self._listener is not None
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, "listener")

    def _add(self, peer: socket.socket, is_launcher: bool = False) -> _Stream:
        peer.setblocking(False)
        watch_peer_host(peer)
        stream = _Stream(peer, is_launcher)
        with self._lock:
            self._streams.add(stream)
        self._selector.register(peer, selectors.EVENT_READ, stream)
        return stream

    def _greet(self, stream: _Stream) -> None:
        assert self._greeting is not None
        stream.join_by = self._clock.monotonic() + JOIN_TIMEOUT_S
        self._write(stream, self._greeting)

    def _write(self, stream: _Stream, message: Message | bytes) -> None:
        """The few small messages of a lobby fit a socket's buffer, unless the client does not read at all."""
        data = message if isinstance(message, bytes) else frame(message)
        try:
            stream.socket.sendall(data)
        except OSError as error:
            logger.debug("lobby: a client does not listen: %s", error)

    def _read(self, stream: _Stream) -> None:
        if stream not in self._streams:
            return
        try:
            data = stream.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave(stream)
            return
        try:
            for message in stream.reader.feed(data):
                self._take(stream, message)
        except (ProtocolError, HandshakeError, zmq.ZMQError) as error:  # the last: no more sockets
            self._refuse(stream, str(error))

    def _take(self, stream: _Stream, message: Message) -> None:
        if isinstance(message, Stop) and stream.is_launcher:
            self._on_event(StopAsked("its launcher asked for it"))
        elif isinstance(message, Join) and stream.client is None and self._registration is not None:
            self._join(stream, message, self._registration)
        else:
            raise ProtocolError(f"a {type(message).__name__.lower()} message is not expected here")

    def _join(self, stream: _Stream, join: Join, registration: ReadyResponse) -> None:
        assert self._context is not None
        for address in (join.input, join.output):
            if not address.startswith(("ipc://", "tcp://")):
                raise ProtocolError(f"{address!r:.100} is not an address that the engine can dial")
        index = self._next_index
        name = f"client {index} ({join.name[:100]})"
        client = connect_client(
            self._context, join.input, join.output, registration, client_index=index, name=name
        )
        self._next_index += 1
        stream.client = client
        stream.join_by = None
        self._on_event(ClientJoined(client))
        with self._lock:
            self._write(stream, Joined(index))

    def _refuse(self, stream: _Stream, reason: str) -> None:
        logger.warning("lobby: a client is turned away: %s", reason)
        with self._lock:
            self._write(stream, Ended(reason))
        self._leave(stream)

    def _leave(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
        self._selector.unregister(stream.socket)
        stream.socket.close()
        if stream.client is not None:
            self._on_event(ClientLeft(stream.client.client_index))
        if stream.is_launcher:
            self._on_event(StopAsked("its launcher is gone"))


def _listen(address: str) -> socket.socket:
    try:
        listener, target = stream_socket(address)
    except ValueError as error:
        raise LobbyError(str(error)) from None
    try:
        if isinstance(target, tuple):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif not target.startswith("\0"):
            _remove_dead_socket(target)
        listener.bind(target)
        listener.listen()
    except OSError as error:
        listener.close()
        raise LobbyError(f"cannot listen on {address}: {error.strerror or error}") from None
    return listener


def _remove_dead_socket(path: str) -> None:
    """A socket file that nobody listens on any more, from an engine that was killed. Raises OSError for a
    file of any other kind, which is somebody's: connecting to it is refused, too.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file of that name that is no socket")
    except FileNotFoundError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except FileNotFoundError:
        pass
    finally:
        probe.close()


def _refusal(peer: socket.socket) -> str | None:
    """Only this user and root may use the engine of a user by a local socket."""
    if peer.family != socket.AF_UNIX:
        return None
    uid = peer_uid(peer)
    return None if uid in (os.getuid(), 0) else f"user {uid} is not the engine's user {os.getuid()}"
