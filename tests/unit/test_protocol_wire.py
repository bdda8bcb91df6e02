"""Frames to structs and back."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import ProtocolError
from engine_core.protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LogprobsLists,
    LogprobsTensors,
    SchedulerStats,
    Tensor,
    UtilityRequest,
)
from engine_core.wire import WireDecoder, WireEncoder, decode_array, peek_request_id

encode = msgspec.msgpack.encode
requests = WireDecoder(EngineCoreRequest)

# A vLLM front end's text request, all 22 fields.
FULL_REQUEST: list[Any] = [
    "cmpl-1-0a1b2c3d", [5, 6, 7], None, {"max_tokens": 4, "_eos_token_id": 2, "n": 1, "output_kind": 1},
    None, 1700000000.5, ["l", 1, "/l", None, False, False], "salt", None, None, None, 2, 0, -3, {"a": "b"},
    False, "cmpl-1", None, {"chat_template_kwargs": {}}, False, None, None,
]  # fmt: skip


def test_layouts_have_the_fields_of_the_boundary() -> None:
    assert len(EngineCoreRequest.__struct_fields__) == 22
    assert len(EngineCoreOutput.__struct_fields__) == 19
    assert len(EngineCoreOutputs.__struct_fields__) == 9
    assert EngineCoreOutput.__struct_fields__[13] == "num_nans_in_logits"
    assert EngineCoreOutput.__struct_fields__[18] == "error"


def test_full_request_is_read_by_position() -> None:
    request = requests.decode([encode(FULL_REQUEST)])
    assert request.request_id == "cmpl-1-0a1b2c3d"
    assert request.prompt_token_ids == [5, 6, 7]
    assert request.sampling_params is not None
    assert (request.sampling_params.max_tokens, request.sampling_params.eos_token_id) == (4, 2)
    assert request.lora_request is not None and request.lora_request.path == "/l"
    assert (request.cache_salt, request.client_index, request.priority) == ("salt", 2, -3)
    assert request.trace_headers == {"a": "b"}


@pytest.mark.parametrize("length", [9, 12, 25])
def test_shorter_and_longer_arrays_are_accepted(length: int) -> None:
    fields = [*FULL_REQUEST, "from", "the", "future"][:length]
    assert requests.decode([encode(fields)]).request_id == FULL_REQUEST[0]


def changed(index: int, value: Any) -> list[Any]:
    return [*FULL_REQUEST[:index], value, *FULL_REQUEST[index + 1 :]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed(0, 5), "request_id: Expected str, got int (found 5)"),
        (changed(1, [1, "q"]), "prompt_token_ids[1]: Expected int, got str (found 'q')"),
        (changed(3, {"max_tokens": "abc"}), "sampling_params.max_tokens: .*found 'abc'"),
        (changed(5, "now"), "arrival_time: Expected float, got str"),
        (FULL_REQUEST[:4], "the field pooling_params is missing"),
        ({"request_id": "a"}, "Expected array, got object"),
    ],
)
def test_error_names_the_field_and_the_value(fields: Any, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        requests.decode([encode(fields)])
    text = str(caught.value)
    assert all(part in text for part in message.split(".*")), text


@pytest.mark.parametrize("code", [1, 2, 4, 127])
def test_pickle_and_other_extension_types_are_refused(code: int) -> None:
    with pytest.raises(ProtocolError, match="refused"):
        requests.decode([encode(changed(2, msgspec.msgpack.Ext(code, b"cos\nsystem\n")))])


def test_arrays_travel_inline_when_small_and_as_frames_when_large() -> None:
    rng = np.random.default_rng(1)
    small = LogprobsLists(
        np.array([[7, 8]], np.int32), np.array([[-0.5, -1]], np.float32), np.array([1], np.int32)
    )
    ids, logprobs = rng.integers(0, 9, (40, 3), np.int32), rng.random((40, 3), np.float32)
    large = LogprobsTensors(Tensor(ids), Tensor(logprobs), Tensor(ids[:, 0].copy()))
    frames = WireEncoder().encode(EngineCoreOutputs(0, [EngineCoreOutput("a", [7], small, large)]))
    assert [len(frame) for frame in frames[1:]] == [480, 480]

    raw = msgspec.msgpack.decode(frames[0])[1][0]
    assert raw[2][0][:2] == ["<i4", [1, 2]] and raw[2][1][0] == "<f4" and raw[2][3] is None
    assert raw[3][0] == ["int32", [40, 3], 1] and raw[3][1] == ["float32", [40, 3], 2]
    assert raw[3][2][0] == "int32" and raw[3][3:] == [None, None]

    (output,) = WireDecoder(EngineCoreOutputs).decode(frames).outputs
    assert output.new_logprobs is not None and output.new_prompt_logprobs_tensors is not None
    np.testing.assert_array_equal(output.new_logprobs.logprobs, small.logprobs)
    np.testing.assert_array_equal(output.new_prompt_logprobs_tensors.logprob_token_ids.array, ids)
    np.testing.assert_array_equal(output.new_prompt_logprobs_tensors.logprobs.array, logprobs)


def test_arrays_in_utility_arguments_arrive_as_written() -> None:
    frames = WireEncoder().encode([0, 2**64 - 1, "m", ["x", {1: np.arange(100)}]])
    call = WireDecoder(UtilityRequest).decode(frames)
    assert call.call_id == 2**64 - 1
    np.testing.assert_array_equal(decode_array(call.args[1][1], frames), np.arange(100))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["<i4", [3], 1], "8 bytes do not make"),
        (["<i4", [2], 2], "frame 2 is not among"),
        (["<i4", [2], 0], "frame 0 is not among"),
        (["<i4", [2], -1], "frame -1 is not among"),
        (["<i4", [-2], 1], "list of lengths"),
        (["<i4", [2**40, 2**40], 1], "do not make"),
        (["|O", [1], 1], "not supported"),
        (["V8", [1], 1], "not supported"),
        (["<f1", [8], 1], "does not exist"),
        (["bfloat16", [4], 1], "not supported"),
        (["<i4", [2], {"shm": 1}], "shared memory"),
        (["<i4", [2], "ab"], "raw bytes"),
        (["<i4", [2]], r"\[dtype, shape, data\]"),
        ("q", r"\[dtype, shape, data\]"),
    ],
)
def test_arrays_that_do_not_fit_their_bytes_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_array(value, [b"payload", b"12345678"])


def test_scheduler_stats_have_every_key_that_the_rust_front_end_wants() -> None:
    stats = msgspec.msgpack.decode(encode(SchedulerStats()))
    assert stats.keys() >= {
        "num_running_reqs", "num_waiting_reqs", "step_counter", "current_wave", "kv_cache_usage",
        "prefix_cache_stats", "kv_cache_eviction_events",
    }  # fmt: skip
    assert stats["prefix_cache_stats"].keys() >= {
        "reset", "requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"
    }  # fmt: skip


@given(st.text(min_size=1, max_size=300), st.integers(1, 70000))
def test_request_id_is_read_from_the_front_of_a_broken_payload(request_id: str, length: int) -> None:
    payload = encode([request_id] + [None] * (length - 1))
    assert peek_request_id(payload) == request_id
    assert peek_request_id(payload[: len(encode(request_id)) + 4] + b"\xc1\xc1") in (request_id, None)


def test_a_long_request_id_is_read_too() -> None:
    assert peek_request_id(encode(["x" * 0xFFFF, "rubbish"])) == "x" * 0xFFFF


@given(st.binary(max_size=200))
def test_rubbish_raises_only_protocol_errors(payload: bytes) -> None:
    peek_request_id(payload)
    for decoder in (requests, WireDecoder(UtilityRequest), WireDecoder(list[str])):
        with contextlib.suppress(ProtocolError):
            decoder.decode([payload])


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        requests.decode([encode(FULL_REQUEST[:2]).replace(b"\x92", b"\x99", 1) + b"\x91" * 100_000])
