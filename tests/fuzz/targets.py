"""Everything that decodes bytes from another process, as functions of bytes.

A target may only raise what its callers expect, and return. `SEEDS` are valid messages to start from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np

from engine_core.client_session import ClientSession
from engine_core.errors import HandshakeError, ProtocolError
from engine_core.handshake import read_init
from engine_core.lobby_protocol import Join, Launch, MessageReader, frame
from engine_core.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    RequestType,
    UtilityRequest,
)
from engine_core.wire import WireEncoder, peek_request_id
from executor.call_codec import CALL, REPLY, Call, Reply, decode_call, decode_reply, encode_call, encode_reply
from executor.control import EnteredPhase, Failure, FromExecutor, FromRank
from executor.sampling_params import SamplingParams
from executor.step import Logprobs, ModelRunnerOutput, NewRequest, SchedulerOutput
from executor.step_codec import (
    OUTPUT,
    STEP,
    BadMessage,
    decode_output,
    decode_step,
    encode_output,
    encode_step,
)
from tests.engines import expected
from tests.protocol_engine import Engine
from transport.codec import decode
from transport.errors import CodecError

Target = Callable[[bytes], None]


def split(data: bytes) -> list[bytes]:
    """Frames out of one string of bytes: each has a byte for its length before it."""
    frames = []
    while data:
        length = data[0] * 8
        frames.append(data[1 : 1 + length])
        data = data[1 + length :]
    return frames


def join(frames: list[bytes]) -> bytes:
    """The reverse, as near as `split` allows."""
    return b"".join(bytes([-(-len(f) // 8)]) + f + bytes(-len(f) % 8) for f in frames)


@lru_cache(maxsize=1)
def shared_engine() -> Engine:
    return Engine(num_blocks=200, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64)


def engine_messages(data: bytes) -> None:
    """A client sends anything; another one is served right, and the books stay in order."""
    engine = shared_engine()
    for kind in (RequestType.ADD, RequestType.ABORT, RequestType.UTILITY, None):
        frames = split(data) or [b""]
        engine.receive(frames if kind is None else [bytes(kind), *frames], client=1)
    engine.add("innocent", [1, 2, 3], client=0)
    tokens: list[int] = []
    for _ in range(50):
        for client, message in engine.step():
            for output in message.outputs if client == 0 else ():
                tokens += output.new_token_ids
        if len(tokens) == 4:
            break
        engine.dispatcher.control.resume_scheduler()  # whoever may pause it may also resume it
    assert tokens == expected([1, 2, 3], 4)
    engine.core.abort_requests(list(engine.core.scheduler.requests))
    while engine.core.has_work:
        engine.step()


def client_messages(data: bytes) -> None:
    session: ClientSession[_Sink, _Sink] = ClientSession()
    session.add([1], None, None, request_id="a", priority=0, cache_salt=None, lora=None, trace_headers=None)
    session.call(_Sink(), [])
    with contextlib.suppress(ProtocolError):
        session.feed(split(data) or [b""])


class _Sink:
    method = "sink"

    def put(self, output: object) -> None: ...
    def answer(self, value: object) -> None: ...
    def fail(self, error: object) -> None: ...


def lobby_stream(data: bytes) -> None:
    reader = MessageReader()
    with contextlib.suppress(ProtocolError):
        for i in range(0, len(data), 7):
            reader.feed(data[i : i + 7])


def front_end_init(data: bytes) -> None:
    with contextlib.suppress(HandshakeError):
        read_init([data])


def request_id(data: bytes) -> None:
    peek_request_id(data)


def ring_messages(data: bytes) -> None:
    """What executor and ranks read from each other."""
    try:
        kind, head, arrays = decode(data)
    except CodecError:
        return
    decoders = {STEP: decode_step, OUTPUT: decode_output, CALL: decode_call, REPLY: decode_reply}
    decoder = decoders.get(kind)
    if decoder is not None:
        with contextlib.suppress(BadMessage, msgspec.DecodeError, ValueError, IndexError):
            decoder(head, arrays)


def control_packets(data: bytes) -> None:
    for type_ in (FromRank, FromExecutor):
        with contextlib.suppress(msgspec.DecodeError):
            msgspec.msgpack.decode(data, type=type_)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        engine_messages,
        client_messages,
        lobby_stream,
        front_end_init,
        request_id,
        ring_messages,
        control_packets,
    )
}


def _bytes(parts: list[object]) -> bytes:
    return b"".join(bytes(memoryview(part).cast("B")) for part in parts)  # type: ignore[arg-type]


_encode = msgspec.msgpack.encode
_ints = np.arange(4, dtype=np.int32)
_request = EngineCoreRequest(
    "request", [1, 2, 3], None, SamplingParams(max_tokens=3, logprobs=2), None, 1.0, None, "salt", None
)
_outputs = EngineCoreOutputs(
    outputs=[
        EngineCoreOutput(
            "a",
            [5],
            new_logprobs=LogprobsLists(
                np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32), np.ones(1, np.int32)
            ),
            finish_reason=FinishReason.LENGTH,
        )
    ]
)
_step = SchedulerOutput(
    7,
    _ints,
    _ints + 1,
    _ints,
    [NewRequest(3, "r", _ints, 4, 0, _ints, SamplingParams())],
    _ints,
    _ints,
    _ints[:1],
    _ints[:0],
)
_output = ModelRunnerOutput(
    7,
    _ints[:, None],
    np.ones(4, np.int32),
    Logprobs(_ints[:2], np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32), np.ones(2, np.int32)),
)

SEEDS: dict[str, list[bytes]] = {
    "engine_messages": [
        join(WireEncoder().encode(_request)),
        join([_encode(["request", "other"])]),
        join([_encode(UtilityRequest(0, 5, "collective_rpc", ["check_health", 1.0, [], {}]))]),
        join([_encode(UtilityRequest(0, 5, "pause_scheduler", ["keep", True]))]),
        join([_encode(UtilityRequest(0, 5, "sleep", [1]))]),
    ],
    "client_messages": [join(WireEncoder().encode(_outputs)), join([b"ENGINE_CORE_DEAD"])],
    "lobby_stream": [
        frame(Join(input="ipc://a", output="ipc://b", name="n")),
        frame(Launch(config=b"", sys_path=["/"])),
    ],
    "front_end_init": [_encode({"addresses": {"inputs": ["tcp://a:1"], "outputs": ["tcp://a:2"]}})],
    "request_id": [_encode(_request)],
    "ring_messages": [
        _bytes([*encode_step(1, _step)]),
        _bytes([*encode_output(1, _output)]),
        _bytes([*encode_call(Call(1, "echo", [_ints, {"a": 1}], {}, None))]),
        _bytes([*encode_reply(Reply(1, [_ints]))]),
    ],
    "control_packets": [_encode(EnteredPhase("load")), _encode(Failure("no", "execute_model", 5))],
}
