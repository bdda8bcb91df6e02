from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from executor.call_codec import (
    CALL,
    REPLY,
    Call,
    Reply,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
)
from executor.sampling_params import SamplingParams
from executor.step import (
    Logprobs,
    LoRARequest,
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SchedulerOutput,
)
from executor.step_codec import (
    OUTPUT,
    STEP,
    BadMessage,
    decode_output,
    decode_step,
    encode_output,
    encode_step,
)
from tests.batch_driver import int32s
from transport.codec import decode


def received(parts: list[Any]) -> tuple[int, memoryview, list[np.ndarray]]:
    return decode(b"".join(memoryview(part).cast("B") for part in parts))


def assert_same(one: Any, other: Any) -> None:
    """Equal in every field, arrays in dtype and shape too."""
    assert type(one) is type(other)
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert np.array_equal(a, b), name
        elif isinstance(a, list):
            assert len(a) == len(b), name
            for x, y in zip(a, b, strict=True):
                assert_same(x, y)
        elif isinstance(a, msgspec.Struct) and not isinstance(a, SamplingParams | LoRARequest):
            assert_same(a, b)
        else:
            assert a == b, name


def columns(length: st.SearchStrategy[int] | int) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int32, length, elements=st.integers(-(2**31), 2**31 - 1))


params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.none() | st.lists(st.integers(0, 99)),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-1, 1)),
    logprobs=st.none() | st.integers(-1, 5),
)
new_requests = st.builds(
    NewRequest,
    slot=st.integers(0, 9),
    request_id=st.text(),
    token_ids=columns(st.integers(1, 50)),
    num_prompt_tokens=st.integers(1, 50),
    num_computed_tokens=st.integers(0, 50),
    block_ids=columns(st.integers(0, 5)),
    params=params,
    lora=st.none() | st.builds(LoRARequest, st.text(), st.integers(1, 9), st.text()),
)


@st.composite
def steps(draw: st.DrawFn) -> SchedulerOutput:
    n, m, f, p = (draw(st.integers(0, 6)) for _ in range(4))
    return SchedulerOutput(
        draw(st.integers(0, 2**40)),
        draw(columns(n)),
        draw(columns(n)),
        draw(columns(n)),
        draw(st.lists(new_requests, max_size=3)),
        draw(columns(m)),
        draw(columns(m)),
        draw(columns(f)),
        draw(columns(p)),
    )


def lines(draw: st.DrawFn, r: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    floats = hnp.arrays(np.float32, (r, k), elements=st.floats(-100, 0, width=32))
    return draw(hnp.arrays(np.int32, (r, k))), draw(floats), draw(columns(r))


@st.composite
def outputs(draw: st.DrawFn) -> ModelRunnerOutput:
    n, w, r, k = (draw(st.integers(low, 5)) for low in (0, 1, 0, 1))
    prompt = [
        PromptLogprobs(row, *lines(draw, draw(st.integers(0, 5)), draw(st.integers(1, 4))))
        for row in range(draw(st.integers(0, 2)))
    ]
    return ModelRunnerOutput(
        draw(st.integers(0, 2**40)),
        draw(hnp.arrays(np.int32, (n, w))),
        draw(columns(n)),
        Logprobs(draw(columns(r)), *lines(draw, r, k)) if draw(st.booleans()) else None,
        prompt,
    )


@given(steps(), st.integers(0, 2**50))
def test_a_step_arrives_as_it_was_sent(step: SchedulerOutput, seq: int) -> None:
    kind, head, arrays = received(encode_step(seq, step))
    assert kind == STEP
    number, decoded = decode_step(head, arrays)
    assert number == seq
    assert_same(step, decoded)


@given(outputs(), st.integers(0, 2**50))
def test_an_output_arrives_as_it_was_sent(output: ModelRunnerOutput, seq: int) -> None:
    kind, head, arrays = received(encode_output(seq, output))
    assert kind == OUTPUT
    number, decoded = decode_output(head, arrays)
    assert number == seq
    assert_same(output, decoded)


def test_columns_of_another_dtype_are_refused() -> None:
    step = SchedulerOutput(1, np.arange(3), int32s([1, 1, 1]), int32s([0, 0, 0]))
    with pytest.raises(TypeError, match="int32, not int64"):
        encode_step(1, step)


def test_output_columns_may_be_strided() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    output = ModelRunnerOutput(1, table[:, 1:2], table[:, 2])
    _, head, arrays = received(encode_output(1, output))
    assert_same(decode_output(head, arrays)[1], output)


def test_a_message_that_announces_more_than_it_holds_is_refused() -> None:
    output = ModelRunnerOutput(1, np.zeros((3, 1), np.int32), int32s([1, 1, 1]))
    _, head, arrays = received(encode_output(1, output))
    with pytest.raises(BadMessage, match="6 numbers announced, 4 received"):
        decode_output(head, [arrays[0][:4]])


def test_a_received_step_cannot_be_written_to() -> None:
    step = SchedulerOutput(1, int32s([1]), int32s([1]), int32s([0]))
    _, decoded = decode_step(*received(encode_step(1, step))[1:])
    with pytest.raises(ValueError, match="read-only"):
        decoded.slots[0] = 5


def test_calls_carry_plain_data_and_arrays() -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    call = Call(7, "update", [1, "two", {"w": weights, "b": [weights[0]]}], {"x": None, "raw": b"\x00"}, 1)
    kind, head, arrays = received(encode_call(call))
    got = decode_call(head, arrays)
    assert kind == CALL and (got.seq, got.method, got.reply_rank) == (7, "update", 1)
    assert got.args[:2] == [1, "two"] and got.kwargs == {"x": None, "raw": b"\x00"}
    assert np.array_equal(got.args[2]["w"], weights) and got.args[2]["w"].dtype == np.float32
    assert np.array_equal(got.args[2]["b"][0], weights[0])


def test_replies_carry_values_or_errors() -> None:
    kind, head, arrays = received(encode_reply(Reply(3, {"n": np.int64(4), "a": np.arange(3)})))
    got = decode_reply(head, arrays)
    assert kind == REPLY and got.seq == 3 and got.error is None
    assert got.value["n"] == 4 and got.value["a"].tolist() == [0, 1, 2]
    _, head, arrays = received(encode_reply(Reply(4, error="ValueError: no")))
    assert decode_reply(head, arrays).error == "ValueError: no"


def test_what_is_not_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="object is neither plain data nor a numpy array"):
        encode_call(Call(1, "f", [object()], {}, None))
