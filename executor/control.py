"""What a rank's process and its executor say to each other beside the queues: at the start, and about a
failure.

They share a SOCK_SEQPACKET socket pair, which keeps the packets apart. The executor sends `StartOrder` and,
when all capacities are known, `CacheSize`; the rank reports each phase it enters, its capacity, that it is
ready, and later a failed step. The executor learns of anything here without looking, because a thread of its
own waits on the socket.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from executor.config import ExecutorConfig
from executor.worker import ModelInfo
from transport.message_queue import Handle

OUTPUT_RANK = 0  # answers steps for all
MAX_PACKET = 1 << 20


class StartOrder(msgspec.Struct, tag=True):
    """All that a rank is told."""

    config: ExecutorConfig
    rank: int
    world_size: int
    parent_pid: int
    sys_path: list[str]
    broadcast: Handle


class CacheSize(msgspec.Struct, tag=True):
    """The number of KV blocks, the same for all ranks."""

    num_blocks: int


class EnteredPhase(msgspec.Struct, tag=True):
    phase: str


class Capacity(msgspec.Struct, tag=True):
    """The rank knows its model, and waits for `CacheSize`."""

    num_blocks: int
    model: ModelInfo
    max_model_len: int


class Ready(msgspec.Struct, tag=True):
    """The rank serves; its answers come on this queue."""

    answers: Handle


class Failure(msgspec.Struct, tag=True):
    """The rank cannot go on. At the start it ends itself; from then on it waits to be ended."""

    message: str
    method: str | None = None
    step_id: int | None = None


FromExecutor = StartOrder | CacheSize
FromRank = EnteredPhase | Capacity | Ready | Failure

_from_executor = msgspec.msgpack.Decoder(FromExecutor)
_from_rank = msgspec.msgpack.Decoder(FromRank)
_encode = msgspec.msgpack.Encoder().encode

Packet = TypeVar("Packet", StartOrder, CacheSize)


class RankHungUp(Exception):
    """The rank closed its end, most likely by ending."""


class ExecutorGone(Exception):
    """The executor closed its end."""


def control_pair() -> tuple[socket.socket, socket.socket]:
    """The executor's end, which never blocks, and the rank's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def send(to: socket.socket, packet: FromExecutor | FromRank) -> None:
    to.send(_encode(packet))


def receive_from_rank(sock: socket.socket) -> FromRank | None:
    """The next packet that is there, or None. Raises RankHungUp, msgspec.DecodeError."""
    try:
        data = sock.recv(MAX_PACKET)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # it closed with a packet unread
        raise RankHungUp from None
    if not data:
        raise RankHungUp
    return _from_rank.decode(data)


def receive_from_executor(sock: socket.socket, expected: type[Packet]) -> Packet:
    """Wait for the next packet. There is no deadline: the executor's death ends this process."""
    data = sock.recv(MAX_PACKET)
    if not data:
        raise ExecutorGone
    packet = _from_executor.decode(data)
    if not isinstance(packet, expected):
        raise TypeError(f"expected {expected.__name__}, got {type(packet).__name__}")
    return packet
