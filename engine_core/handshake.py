"""How the engine joins a vLLM front end: HELLO, INIT, data sockets, READY.

The messages are pure functions; `FrontEndDialog` puts them on the handshake socket. Between INIT and READY
the caller starts the engine and connects the data sockets (`sockets.py`).
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

import msgspec
import zmq

from engine_core.errors import HandshakeError, ProtocolError
from engine_core.protocol import EngineAddresses, HandshakeMessage, InitMessage
from engine_core.wire import WireDecoder
from engine_core.zmq_monitor import events_of, monitor_of

logger = logging.getLogger("engine_core")

INIT_TIMEOUT_S = 300.0  # from HELLO to INIT, as vLLM's engine waits
WARN_AFTER_S = 10.0  # and again as long as nothing comes
READY_LINGER_MS = 5000
_init_decoder = WireDecoder(InitMessage)


class FrontEnd(msgspec.Struct, kw_only=True, frozen=True):
    """A vLLM front end to dial.

    Either `handshake_address` is given, or, for a front end that expects engines on its data sockets at once
    (`vllm-rs frontend`), `addresses`. `local` and `headless` must be what the front end expects.
    """

    handshake_address: str | None = None
    addresses: EngineAddresses | None = None
    engine_index: int = 0  # data-parallel rank
    local: bool = False
    headless: bool = True


def identity(engine_index: int) -> bytes:
    """The routing id of an engine's sockets. vLLM's Rust front end maps it back to the engine's index."""
    return engine_index.to_bytes(2, "little")


def hello(front_end: FrontEnd) -> bytes:
    return msgspec.msgpack.encode(HandshakeMessage("HELLO", front_end.local, front_end.headless))


def ready(front_end: FrontEnd) -> bytes:
    return msgspec.msgpack.encode(HandshakeMessage("READY", front_end.local, front_end.headless))


def read_init(frames: list[bytes]) -> InitMessage:
    """Raises `HandshakeError` for anything but an INIT that can be followed."""
    if len(frames) != 1:
        raise HandshakeError(f"INIT must be one frame, the front end sent {len(frames)}")
    try:
        message = _init_decoder.decode(frames)
    except ProtocolError as error:
        raise HandshakeError(f"the front end's INIT message is not one: {error}") from None
    check_addresses(message.addresses)
    return message


def check_addresses(addresses: EngineAddresses) -> None:
    """Raises `HandshakeError` unless inputs and outputs come in pairs and the coordinator's do too."""
    if not addresses.inputs or len(addresses.inputs) != len(addresses.outputs):
        raise HandshakeError(
            f"the front end names {len(addresses.inputs)} input and {len(addresses.outputs)} output "
            "addresses; they must come in pairs"
        )
    if (addresses.coordinator_input is None) != (addresses.coordinator_output is None):
        raise HandshakeError("the front end names one of its coordinator's two addresses, not the other")


class FrontEndDialog:
    """The handshake socket, from HELLO to READY."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], front_end: FrontEnd) -> None:
        if front_end.handshake_address is None:
            raise ValueError("the front end has no handshake address")
        self._front_end = front_end
        self._address = front_end.handshake_address
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity(front_end.engine_index))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = monitor_of(self._socket, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self.close()
            raise HandshakeError(f"{self._address} cannot be dialled: {error}") from None

    def join(self, timeout_s: float = INIT_TIMEOUT_S, warn_after_s: float = WARN_AFTER_S) -> InitMessage:
        """Say HELLO and wait for INIT. The front end may start later than the engine, within the time."""
        self._socket.send(hello(self._front_end))
        waited_s = 0.0
        while not self._socket.poll(int(min(warn_after_s, timeout_s - waited_s) * 1000), zmq.POLLIN):
            waited_s += warn_after_s
            if waited_s >= timeout_s:
                raise HandshakeError(
                    f"the front end at {self._address} did not answer HELLO within {timeout_s:g} s; is it "
                    "running, and does it listen there (--data-parallel-address, --data-parallel-rpc-port)?"
                )
            logger.warning(
                "waiting for the front end at %s: no answer to HELLO for %g s, limit %g s",
                self._address,
                waited_s,
                timeout_s,
            )
        return read_init(self._socket.recv_multipart())

    def join_whenever(self, give_up: threading.Event, slice_s: float) -> InitMessage | None:
        """As `join`, for as long as it takes; None if told to give up. Raises `HandshakeError`.

        HELLO is said to everybody who answers the phone: one front end may take the place of another that has
        heard it and died. The socket stays the same: with a second one of the same identity, a front end that
        the first has found already would not talk.
        """
        while not give_up.is_set():
            for _ in events_of(self._monitor):
                self._socket.send(hello(self._front_end))
            if self._socket.poll(int(slice_s * 1000), zmq.POLLIN):
                return read_init(self._socket.recv_multipart())
        return None

    def announce_ready(self) -> None:
        """The engine serves. The socket may be closed afterwards: the message still goes out."""
        self._socket.setsockopt(zmq.LINGER, READY_LINGER_MS)
        self._socket.send(ready(self._front_end))

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def __enter__(self) -> FrontEndDialog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
