"""Bytes that are no protocol: mutilated and invented messages, on every socket that takes any."""

from __future__ import annotations

import random

import msgspec

from engine_core.client_connection import Connection
from engine_core.lobby_protocol import stream_socket
from engine_core.protocol import EngineCoreRequest, RequestType
from executor.sampling_params import SamplingParams

_KINDS = (RequestType.ADD, RequestType.ABORT, RequestType.UTILITY, RequestType.START_DP_WAVE, b"\x7f", b"")
_VALID = msgspec.msgpack.encode(
    EngineCoreRequest("rubbish", [1, 2, 3], None, SamplingParams(), None, 0.0, None, None, None)
)


def frames(rng: random.Random) -> list[bytes]:
    """One message that a client might send if it were out of its mind."""
    kind = rng.choice(_KINDS)
    payload = rng.choice((_mutilated, _random_bytes, _nested))(rng)
    aux = [_random_bytes(rng) for _ in range(rng.choice([0, 0, 0, 1, 3]))]
    return [bytes(kind), payload, *aux] if rng.random() < 0.95 else [bytes(kind)]


def send_to_engine(address: str, seed: int, count: int) -> None:
    """Join as a client, send `count` messages, and leave."""
    rng = random.Random(seed)
    connection = Connection.connect(address, timeout_s=10.0)
    try:
        for _ in range(count):
            connection.send(list(frames(rng)))
    finally:
        connection.close()


def send_to_lobby(address: str, seed: int) -> None:
    """Say nonsense to the lobby, and hang up in the middle of it."""
    rng = random.Random(seed)
    stream, target = stream_socket(address)
    with stream:
        stream.settimeout(10.0)
        stream.connect(target)
        try:
            stream.sendall(_random_bytes(rng) + rng.randrange(1 << 32).to_bytes(4, "big") + _mutilated(rng))
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            return  # it has hung up first


def _mutilated(rng: random.Random) -> bytes:
    data = bytearray(_VALID)
    for _ in range(rng.randint(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data)


def _random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 100, 5000]))


def _nested(rng: random.Random) -> bytes:
    """Deep arrays, or lengths that promise more than there is."""
    if rng.random() < 0.5:
        return b"\x91" * rng.choice([10, 5000])
    return rng.choice([b"\xdd", b"\xdb", b"\xc6", b"\xdf"]) + rng.randrange(1 << 32).to_bytes(4, "big")
