"""Outputs of a step as messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_core.encoding import OutputEncoder, wire_prefix
from engine_core.outputs import ClientOutputs
from engine_core.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    SchedulerStats,
    Tensor,
    UtilityOutput,
)
from engine_core.wire import WireDecoder

VOCAB = 70_000
encoder = OutputEncoder(engine_index=3)
decoder = WireDecoder(EngineCoreOutputs)


@dataclass(eq=False)
class Row:
    wire_prefix: bytes


def rows(ids: list[str], tokens: list[int], **more: Any) -> ClientOutputs:
    requests: Any = [Row(wire_prefix(request_id)) for request_id in ids]
    return ClientOutputs(requests, np.array(tokens, np.int32), **more)


def decoded(outputs: ClientOutputs, **arguments: Any) -> EngineCoreOutputs:
    frames = encoder.outputs(0, outputs, 12.5, **arguments)
    assert frames is not None
    return decoder.decode(frames)


@pytest.mark.parametrize("count", [1, 15, 16, 300, 66_000])
def test_plain_rows_decode_to_one_token_each(count: int) -> None:
    ids = [f"request-{i}" * (1 + i % 5) for i in range(count)]
    tokens = [(i * 7919) % VOCAB for i in range(count)]
    message = decoded(rows(ids, tokens))
    assert (message.engine_index, message.timestamp) == (3, 12.5)
    assert [output.request_id for output in message.outputs] == ids
    assert [output.new_token_ids for output in message.outputs] == [[token] for token in tokens]
    assert all(output.finish_reason is None for output in message.outputs)


def test_rows_follow_the_requests_from_message_to_message() -> None:
    """Per client: the same requests again, others, fewer, in another order, and a list changed in place."""
    requests: list[Any] = [Row(wire_prefix(f"r{i}" * i)) for i in range(1, 9)]
    rng = np.random.default_rng(0)
    shared = requests[:3]
    for step, chosen in enumerate(
        [requests, requests, requests[2:], requests[::-1], shared, shared, requests[:1], requests]
    ):
        if step == 5:
            shared[1] = requests[7]
        for client in (0, 7):
            tokens = rng.integers(0, VOCAB, len(chosen)).astype(np.int32)
            frames = encoder.outputs(client, ClientOutputs(chosen, tokens), 1.0)
            assert frames is not None
            outputs = decoder.decode(frames).outputs
            assert [wire_prefix(output.request_id) for output in outputs] == [r.wire_prefix for r in chosen]
            assert [output.new_token_ids for output in outputs] == [[token] for token in tokens.tolist()]
    encoder.forget(7)


def test_tokens_of_every_width_are_encoded() -> None:
    tokens = [0, 127, 128, 255, 256, 65535, 65536, VOCAB - 1]
    message = decoded(rows([str(t) for t in tokens], tokens))
    assert [output.new_token_ids for output in message.outputs] == [[t] for t in tokens]


def test_rare_outputs_join_the_plain_rows_in_one_envelope() -> None:
    logprobs = LogprobsLists(
        np.zeros((1, 101), np.int32), np.ones((1, 101), np.float32), np.ones(1, np.int32)
    )
    more = [
        EngineCoreOutput("b", [4], new_logprobs=logprobs),
        EngineCoreOutput("c", [], finish_reason=FinishReason.ABORT),
    ]
    outputs = rows(["a"], [9], outputs=more, finished_requests=["c"], scheduler_stats=SchedulerStats(1, 2))
    frames = encoder.outputs(0, outputs, 1.0, "v7")
    assert frames is not None and len(frames) == 1, "a message of several frames can kill the engine"
    message = decoder.decode(frames)
    assert [output.request_id for output in message.outputs] == ["a", "b", "c"]
    assert message.outputs[1].new_logprobs is not None
    np.testing.assert_array_equal(message.outputs[1].new_logprobs.logprobs, logprobs.logprobs)
    assert message.outputs[2].finish_reason is FinishReason.ABORT
    assert message.finished_requests == ["c"] and message.weight_version == "v7"
    assert message.scheduler_stats is not None and message.scheduler_stats.num_waiting_reqs == 2


def test_nothing_to_say_makes_no_message() -> None:
    assert encoder.outputs(0, ClientOutputs(), 1.0) is None
    assert encoder.outputs(0, ClientOutputs(finished_requests=[]), 1.0) is None


def test_messages_have_nine_fields_and_one_family() -> None:
    frames = encoder.outputs(0, rows(["a"], [1], scheduler_stats=SchedulerStats()), 1.0)
    assert frames is not None
    assert len(raw := msgspec.msgpack.decode(frames[0])) == 9 and raw[4] is raw[6] is raw[7] is None
    raw = msgspec.msgpack.decode(encoder.utility(UtilityOutput(7, None, (None, ["generate"])), 1.0)[0])
    assert raw == [3, [], None, 1.0, [7, None, [None, ["generate"]]], None, None, None, None]
    raw = msgspec.msgpack.decode(encoder.counts(SchedulerStats(2, 1), 1.0)[0])
    assert raw[1] == [] and raw[4:] == [None] * 5 and raw[2]["num_running_reqs"] == 2


def test_call_ids_beyond_a_signed_64_bit_number_are_echoed() -> None:
    frames = encoder.utility(UtilityOutput(2**64 - 1, "no", None), 1.0)
    assert msgspec.msgpack.decode(frames[0])[4] == [2**64 - 1, "no", None]


@pytest.mark.parametrize("result", [object(), np.array([object()]), Tensor(np.zeros(2, np.uint16))])
def test_results_that_do_not_travel_raise(result: Any) -> None:
    with pytest.raises(TypeError):
        encoder.utility(UtilityOutput(1, None, (None, result)), 1.0)
