"""How a client reaches an engine: by launching one, or through the lobby of one that runs."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from engine_core import health
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError, EngineStartError, EngineUnreachableError, ProtocolError
from engine_core.lobby_protocol import (
    VERSION,
    Ended,
    Greeting,
    Join,
    Joined,
    Launch,
    Message,
    MessageReader,
    Stop,
    frame,
    peer_uid,
    stream_socket,
    watch_peer_host,
)
from engine_core.protocol import ReadyResponse
from engine_core.sockets import Context, Socket
from engine_core.wire import Frame
from engine_core.zmq_monitor import monitor_of
from executor.spawning import module_command, module_environment
from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_page import StatePage, StatePageError

logger = logging.getLogger("engine_core")

JOIN_TIMEOUT_S = 10.0
WARN_AFTER_S = 10.0  # without a message for somebody who waits; how long to wait is up to them
LAST_WORD_TIMEOUT_S = 1.0
LAST_OUTPUTS_TIMEOUT_S = 0.5  # of an orderly stop, which ends every request with an output
EXIT_TIMEOUT_S = 15.0  # the engine's own deadlines are shorter
LEAVE_LINGER_MS = 200  # for what was sent last, if the engine reads at all
MAX_UNREAD = 1000  # messages that wait for this client to read; what comes then waits in the engine, merged
_NOT_LAST = zmq.NOBLOCK | zmq.SNDMORE
M = TypeVar("M", bound=Message)


class Connection:
    """A joined engine: the stream, the two data sockets, and the process if it was launched.

    `open_*` may be called in any thread; afterwards the connection belongs to one.
    """

    def __init__(self, stream: socket.socket, process: subprocess.Popen[bytes] | None, clock: Clock) -> None:
        self.stream = stream
        self.process = process
        self._clock = clock
        self._reader = MessageReader()
        self._messages: list[Message] = []
        self._context: Context = zmq.Context()
        self.requests: Socket  # ROUTER
        self.outputs: Socket  # PULL
        self.info: ReadyResponse
        self.lobby: str | None = None
        self.pid = 0
        self.client_index = -1
        self._engine_identity = b""

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        *,
        start_timeout_s: float,
        lobby: str | None,
        log_level: str,
        started: Callable[[Connection], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Connection:
        """Start an engine process and join it. Raises `EngineStartError` with the engine's first error.

        `started` is given the connection before it waits, for `interrupt`.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: a terminal's Ctrl-C is the launcher's to handle.
            process = subprocess.Popen(
                module_command("engine_core.launched", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=module_environment(),
            )
        connection = cls(ours, process, clock)
        try:
            if started is not None:
                started(connection)
            launch = Launch(
                config=config.to_msgpack(), lobby=lobby, sys_path=sys.path, log_level=log_level.upper()
            )
            connection._say(launch)
            connection._join(start_timeout_s)
        except (EngineDeadError, ProtocolError) as error:
            connection.close()
            raise EngineStartError(_cause(error)) from None
        except OSError as error:
            connection.close()
            raise EngineStartError(f"the engine cannot be told what to run: {error}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        timeout_s: float,
        started: Callable[[Connection], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Connection:
        """Join a running engine. Raises `EngineUnreachableError` if there is none that lets us in."""
        try:
            stream, target = stream_socket(address)
        except ValueError as error:
            raise EngineUnreachableError(str(error)) from None
        connection = cls(stream, None, clock)
        try:
            if started is not None:
                started(connection)
            stream.settimeout(timeout_s)
            stream.connect(target)
            watch_peer_host(stream)
            connection._join(timeout_s)
        except OSError as error:
            connection.close()
            raise EngineUnreachableError(f"no engine at {address}: {error.strerror or error}") from None
        except (EngineDeadError, ProtocolError) as error:
            connection.close()
            raise EngineUnreachableError(f"{address} cannot be joined: {_cause(error)}") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, frames: list[Frame]) -> None:
        send = self.requests.send  # frame by frame: send_multipart takes three times as long
        send(self._engine_identity, _NOT_LAST)
        for part in frames[:-1]:
            send(part, _NOT_LAST)
        send(frames[-1], zmq.NOBLOCK)

    def interrupt(self) -> None:
        """From another thread: have `launch` or `connect` fail now."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def last_word(self) -> Ended:
        """Why the stream ended, or why the engine said that it is dead: it may take a moment to come."""
        deadline = self._clock.monotonic() + LAST_WORD_TIMEOUT_S
        try:
            while True:
                message = self._hear(deadline, "did not say why it ended")
                if isinstance(message, Ended):
                    return message
        except (EngineDeadError, ProtocolError) as error:
            return Ended(_cause(error), crashed=True)

    def close(self) -> None:
        """Leave; a launched engine ends. Idempotent."""
        # First of all, while the engine still reads: libzmq 4.3 aborts the process when a socket is closed
        # while its peer goes away in the middle of a message.
        self._context.destroy(linger=LEAVE_LINGER_MS)
        with contextlib.suppress(OSError):
            if self.process is not None:
                self._say(Stop())
            self.stream.shutdown(socket.SHUT_WR)
        if self.process is not None:
            self._reap(self.process)
        self.stream.close()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # Joining

    def _join(self, timeout_s: float) -> None:
        deadline = self._clock.monotonic() + timeout_s
        silence = f"was not heard within {timeout_s:g} s: it is starting, or stopped, or no engine"
        greeting = self._expect(Greeting, deadline, silence)
        if greeting.version != VERSION:
            raise ProtocolError(
                f"the engine's lobby speaks version {greeting.version}, this client {VERSION}"
            )
        self.info, self.lobby, self.pid = greeting.ready, greeting.lobby, greeting.pid
        deadline = self._clock.monotonic() + JOIN_TIMEOUT_S
        self.requests = self._bind(zmq.ROUTER)
        self.outputs = self._bind(zmq.PULL)
        monitor = monitor_of(self.outputs, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        addresses = [
            sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for sock in (self.requests, self.outputs)
        ]
        name = f"{os.path.basename(sys.argv[0] or 'python')}, pid {os.getpid()}"
        self._say(Join(input=addresses[0], output=addresses[1], name=name))
        silence = f"did not let this client in within {JOIN_TIMEOUT_S:g} s"
        self.client_index = self._expect(Joined, deadline, silence).client_index
        for sock in (self.requests, monitor):
            self._await(sock, deadline)
        self.outputs.disable_monitor()
        monitor.close(0)
        self._engine_identity, registration = self.requests.recv_multipart()
        self.info = msgspec.msgpack.decode(registration, type=ReadyResponse)
        self.stream.setblocking(False)

    def _bind(self, kind: int) -> Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        sock.setsockopt(zmq.LINGER, 0)
        if self.stream.family == socket.AF_UNIX:
            # A name in the abstract namespace: no file that could be left behind, and no limit on TMPDIR.
            # Its only guard is the filter; nobody but the engine's user may connect.
            sock.setsockopt(zmq.IPC_FILTER_UID, peer_uid(self.stream))
            sock.bind(f"ipc://@engine-core-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}")
        else:
            host = self.stream.getsockname()[0]
            sock.setsockopt(zmq.IPV6, int(":" in host))
            sock.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        return sock

    def _say(self, message: Message) -> None:
        self.stream.sendall(frame(message))

    def _expect(self, kind: type[M], deadline: float, silence: str) -> M:
        message = self._hear(deadline, silence)
        if isinstance(message, Ended):
            raise EngineDeadError(message.cause)
        if not isinstance(message, kind):
            raise ProtocolError(f"the engine said {type(message).__name__.lower()} out of turn")
        return message

    def _hear(self, deadline: float, silence: str) -> Message:
        """The engine's next message; if none comes, `EngineDeadError` with `silence` as what it did."""
        poll = select.poll()
        poll.register(self.stream, select.POLLIN)
        while not self._messages:
            wait_s = max(0.0, deadline - self._clock.monotonic())
            if not poll.poll(wait_s * 1000):
                raise EngineDeadError(f"{self._who()} {silence}")
            try:
                data = self.stream.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError as error:
                raise EngineDeadError(f"{self._who()} cannot be heard: {error}") from None
            if not data:
                raise EngineDeadError(self._how_it_ended())
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def _await(self, sock: Socket, deadline: float) -> None:
        """Wait until a socket has something, as long as the engine lives."""
        poller = zmq.Poller()
        poller.register(sock, zmq.POLLIN)
        poller.register(self.stream, zmq.POLLIN)
        wait_s = max(0.0, deadline - self._clock.monotonic())
        ready = dict(poller.poll(int(wait_s * 1000)))
        if sock not in ready:
            if ready:
                raise EngineDeadError(self.last_word().cause)
            raise EngineDeadError(f"{self._who()} has not connected to this client's sockets in time")

    def warn_of_silence(self, seconds: float) -> None:
        """Log that somebody waits for the engine, and whom the engine waits for."""
        logger.warning("nothing has come from %s for %.0f s: %s", self._who(), seconds, self._verdict())

    def _verdict(self) -> str:
        """What its state page says, if it is on this host."""
        if self.stream.family != socket.AF_UNIX:
            return "it is on another host"
        try:
            with StatePage.open(self.pid) as page:
                snapshot = page.snapshot()
        except (StatePageError, OSError) as error:
            return str(error)
        now = self._clock.monotonic()
        verdict = health.live(snapshot, now)
        if verdict.ok:
            verdict = health.progress(snapshot, now, stall_limit_s=WARN_AFTER_S / 2)
        return verdict.reason

    def _who(self) -> str:
        pid = self.process.pid if self.process is not None else self.pid
        return f"the engine (pid {pid})" if pid else "the engine"

    def _how_it_ended(self) -> str:
        if self.process is None:
            return f"{self._who()} has ended without a word"
        try:
            code = self.process.wait(LAST_WORD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"{self._who()} has closed its connection without a word"
        if code < 0:
            return f"{self._who()} was killed by {signal.Signals(-code).name}"
        return f"{self._who()} exited with code {code} without a word; its stderr may tell"


def _cause(error: EngineDeadError | ProtocolError) -> str:
    return error.cause if isinstance(error, EngineDeadError) else str(error)
