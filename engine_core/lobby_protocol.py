"""What an engine and its own clients say before data flows, and the last words after it.

A client opens a stream to the engine's lobby. Messages are msgpack maps with a `type`, each after its length
as 4 bytes, big-endian:

    engine: greeting                       once it serves; what the engine is
    client: join                           the addresses of the ROUTER and the PULL that it has bound
    engine: joined                         it has dialled them as one more front end
    ...                                    requests and outputs on the ZMQ sockets; the stream stays open
    engine: ended                          the engine ends, and why

The stream is the proof of life for both sides: its end without a last word means that the other one is dead.
A client that launches an engine hands it one end of a socket pair, says `launch` first, and may say `stop`.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from typing import Any

import msgspec

from engine_core.errors import ProtocolError
from engine_core.protocol import ReadyResponse
from transport.processes import SOCKET_PATH_LIMIT

VERSION = 1
MAX_MESSAGE_BYTES = 16 << 20  # far above a configuration with its worker options


class Greeting(msgspec.Struct, tag="greeting", kw_only=True):
    version: int = VERSION
    pid: int
    lobby: str | None  # where other clients can join
    ready: ReadyResponse


class Join(msgspec.Struct, tag="join", kw_only=True):
    input: str  # ROUTER
    output: str  # PULL
    name: str  # for the engine's log


class Joined(msgspec.Struct, tag="joined"):
    client_index: int


class Launch(msgspec.Struct, tag="launch", kw_only=True):
    config: bytes  # EngineConfig.to_msgpack
    lobby: str | None = None  # also listen there
    sys_path: list[str] = []  # the launcher's, so that its worker class can be imported
    log_level: str = "WARNING"


class Stop(msgspec.Struct, tag="stop"):
    """The launcher wants the engine to end."""


class Ended(msgspec.Struct, tag="ended"):
    """The engine ends, did not start, or refuses the client: its last word."""

    cause: str
    crashed: bool = False


Message = Greeting | Join | Joined | Launch | Stop | Ended
_LENGTH = struct.Struct(">I")
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Greeting | Join | Joined | Launch | Stop | Ended
)


def frame(message: Message) -> bytes:
    payload = _encode(message)
    return _LENGTH.pack(len(payload)) + payload


class MessageReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises `ProtocolError`; the stream is of no use then."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a lobby message of {length} bytes was announced, more than allowed")
            end = _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                messages.append(_decoder.decode(buffer[_LENGTH.size : end]))
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"not a lobby message: {error}") from None
            del buffer[:end]
        return messages


# Addresses: `ipc://@name` (abstract: no file), `ipc:///path`, `tcp://host:port`


def default_address() -> str:
    """A private one of this process."""
    return f"ipc://@engine-core-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"


def stream_socket(address: str) -> tuple[socket.socket, Any]:
    """A socket of the right family, and what to bind or connect it to. Raises ValueError."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        path = rest.replace("@", "\0", 1) if rest.startswith("@") else rest
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            raise ValueError(
                f"{address}: a socket path has at most {SOCKET_PATH_LIMIT} bytes, this one has "
                f"{len(os.fsencode(path))}; choose a shorter one (TMPDIR?)"
            )
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdigit() and int(port) < 1 << 16:
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        stream = socket.socket(family, socket.SOCK_STREAM)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream, (host, int(port))
    raise ValueError(f"{address!r} is not an address: ipc://@name, ipc:///path or tcp://host:port")


def peer_uid(stream: socket.socket) -> int:
    """The user at the other end of a unix socket."""
    _, uid, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def watch_peer_host(stream: socket.socket) -> None:
    """Have a TCP stream end within about 20 s if the other host is gone."""
    if stream.family in (socket.AF_INET, socket.AF_INET6):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
