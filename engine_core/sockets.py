"""The engine's ends of the data sockets: one DEALER and one PUSH for each client, and the coordinator's pair.

A *client* is whoever has an output socket of its own: an API server of a vLLM front end, or one of our
clients. It is known by its index, under which its outputs leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from engine_core.errors import HandshakeError
from engine_core.handshake import FrontEnd, identity
from engine_core.protocol import COORDINATOR_READY, ENGINE_CORE_DEAD, EngineAddresses, ReadyResponse
from engine_core.wire import Frame
from engine_core.zmq_monitor import monitor_of

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

MAX_FRAME_BYTES = 1 << 30  # ZMQ cuts the connection rather than take in a longer one
MAX_UNSENT = 256  # messages that ZMQ keeps for a client that does not read; then it is a slow one
CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
OUTPUT_LINGER_MS = 4000  # last outputs still go out when the engine ends, as vLLM's do


@dataclass(slots=True)
class ClientSockets:
    """One client's sockets."""

    client_index: int
    name: str  # for messages to people
    input: Socket
    output: Socket
    # Client indices of the same front end, of which a request's `client_index` is a position.
    group: range
    monitor: Socket | None = None  # of `input`: says when its connection is lost, and when it is there again
    is_lost: bool = False
    unsent: deque[Sequence[Frame]] = field(default_factory=deque)  # ZMQ's queue for it was full

    def send(self, frames: Sequence[Frame]) -> None:
        """Never blocks: what ZMQ does not take is `unsent`."""
        self.unsent.append(frames)
        if len(self.unsent) == 1:
            self.send_unsent()

    def send_unsent(self) -> None:
        """As much as ZMQ takes now."""
        try:
            while self.unsent:
                frames = self.unsent[0]
                if len(frames) == 1:
                    self.output.send(frames[0], zmq.NOBLOCK)
                else:
                    self.output.send_multipart(frames, zmq.NOBLOCK, copy=False)
                self.unsent.popleft()
        except zmq.Again:
            pass

    def send_dead(self) -> None:
        self.send([ENGINE_CORE_DEAD])

    def replace_output(self, output: Socket) -> None:
        """Drop what waits to be sent, and what has come and was not read."""
        self.output.close(0)
        self.output = output
        self.unsent.clear()
        while self.input.poll(0, zmq.POLLIN):
            self.input.recv_multipart()

    def close(self, linger_ms: int = OUTPUT_LINGER_MS) -> None:
        if self.monitor is not None:
            self.input.disable_monitor()
            self.monitor.close(0)
        self.input.close(0)
        self.output.close(linger_ms)


def connect_client(
    context: Context,
    input_address: str,
    output_address: str,
    registration: ReadyResponse,
    *,
    client_index: int,
    name: str,
    group: range | None = None,
    watch: bool = False,
) -> ClientSockets:
    """Dial one client's two addresses and register. Raises `HandshakeError` for an address that is none.

    ZMQ connects in the background; what is sent before waits. `watch`: have a `monitor`.
    """
    engine_identity = identity(registration.data_parallel_rank)
    input_socket = _connect(context, zmq.DEALER, input_address, engine_identity)
    monitor = monitor_of(input_socket, CONNECTION_EVENTS) if watch else None
    try:
        output_socket = connect_output(context, output_address)
    except HandshakeError:
        input_socket.close(0)
        raise
    input_socket.send(encode_registration(registration))
    group = range(client_index, client_index + 1) if group is None else group
    return ClientSockets(client_index, name, input_socket, output_socket, group, monitor)


def encode_registration(registration: ReadyResponse) -> bytes:
    """The first message on an input socket."""
    return msgspec.msgpack.encode(registration)


def connect_output(context: Context, address: str) -> Socket:
    """Raises `HandshakeError`."""
    return _connect(context, zmq.PUSH, address, max_unsent=MAX_UNSENT)


def connect_front_end(
    context: Context, addresses: EngineAddresses, front_end: FrontEnd, registration: ReadyResponse
) -> list[ClientSockets]:
    """Dial every API server of a front end; client i is its API server i."""
    group = range(len(addresses.inputs))
    where = front_end.handshake_address or addresses.inputs[0]
    clients: list[ClientSockets] = []
    try:
        for i, pair in enumerate(zip(addresses.inputs, addresses.outputs, strict=True)):
            name = f"front end {where}" + (f", API server {i}" if len(group) > 1 else "")
            clients.append(
                connect_client(
                    context, *pair, registration, client_index=i, name=name, group=group, watch=True
                )
            )
    except HandshakeError:
        for client in clients:
            client.close(0)
        raise
    return clients


class CoordinatorSockets:
    """vLLM's data-parallel coordinator: it is told the counts of requests, and opens the start gate."""

    def __init__(self, context: Context, input_address: str, output_address: str) -> None:
        self.address = input_address
        self.input = _connect(context, zmq.XSUB, input_address)
        try:
            self.output = _connect(context, zmq.PUSH, output_address)
        except HandshakeError:
            self.input.close(0)
            raise
        self.input.send(b"\x01")  # subscribe to everything

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all engines have subscribed. Raises `HandshakeError`."""
        if not self.input.poll(int(timeout_s * 1000), zmq.POLLIN):
            raise HandshakeError(
                f"the coordinator at {self.address} did not open the start gate within {timeout_s:g} s: "
                "not all engines of the deployment have subscribed"
            )
        frames = self.input.recv_multipart()
        if frames != [COORDINATOR_READY]:
            raise HandshakeError(f"the coordinator at {self.address} sent {frames!r:.80} instead of READY")

    def discard_input(self) -> None:
        """Wave starts, which concern mixture-of-experts deployments only, and late READY frames."""
        while self.input.poll(0, zmq.POLLIN):
            self.input.recv_multipart()

    def close(self) -> None:
        self.input.close(0)
        self.output.close(OUTPUT_LINGER_MS)


def _connect(
    context: Context, kind: int, address: str, socket_identity: bytes | None = None, max_unsent: int = 0
) -> Socket:
    """`max_unsent` messages wait in ZMQ at most; 0: no limit."""
    socket = context.socket(kind)
    if socket_identity is not None:
        socket.setsockopt(zmq.IDENTITY, socket_identity)
    socket.setsockopt(zmq.SNDHWM, max_unsent)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    # A host that is gone without a word is noticed within half a minute. ZMQ has heartbeats of its own, but
    # not every front end answers them.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise HandshakeError(f"{address} cannot be dialled: {error}") from None
    return socket
