"""Which requests are refused, and how the refusal reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_core.errors import RequestError
from engine_core.protocol import EngineCoreRequest
from engine_core.validation import RequestLimits, validate_request
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest

DEFAULTS = SamplingParams()
LIMITS = RequestLimits(max_model_len=10, max_kv_tokens=8, vocab_size=100)


def request(
    prompt: Any = (1, 2, 3), params: SamplingParams | None = DEFAULTS, **fields: Any
) -> EngineCoreRequest:
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    head = {"request_id": "r", "mm_features": None, "pooling_params": None, "arrival_time": 0.0}
    rest = {"lora_request": None, "cache_salt": None, "data_parallel_rank": None}
    return EngineCoreRequest(prompt_token_ids=prompt, sampling_params=params, **{**head, **rest, **fields})


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return {"key": value}


def test_prompt_comes_back_as_int32_from_a_list_or_from_bytes() -> None:
    for prompt in ([1, 2, 99], np.array([1, 2, 99], "<i4").tobytes()):
        tokens, _ = validate_request(request(prompt), LIMITS)
        assert tokens.dtype == np.int32 and tokens.tolist() == [1, 2, 99]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(None), "prompt_token_ids is empty"),
        (request(()), "prompt_token_ids is empty"),
        (request(b"123456"), "not a multiple of 4"),
        (request((1, 100)), r"prompt_token_ids\[1\] = 100 is outside the vocabulary of 100"),
        (request((1, -1)), r"prompt_token_ids\[1\] = -1"),
        (request((2**40, 1)), r"prompt_token_ids\[0\] = 1099511627776"),
        (request(np.array([1, -7], "<i4").tobytes()), r"prompt_token_ids\[1\] = -7"),
        (request((1,) * 10), "10 tokens and leaves no room for output: max_model_len is 10"),
        (request((1,) * 9), "9 tokens, but the whole KV cache holds 8"),
        (request(lora_request=LoRARequest("a", 1, "/a")), "adapters are not enabled"),
        (request(request_id=""), "request_id is empty"),
        (request(request_id="x" * 4097), "request_id has 4097 characters, at most 4096"),
        (request(arrival_time=float("nan")), "arrival_time = nan"),
        (request(arrival_time=float("-inf")), "arrival_time = -inf"),
        (request(params=SamplingParams(extra_args=nested(65))), "extra_args is nested more than 64 deep"),
        (request(params=None), "sampling_params is missing"),
        (request(params=None, pooling_params=["embed"]), "pooling"),
        (request(mm_features=[["x"]]), "multi-modal"),
        (request(prompt_embeds=["float32", [0], 1]), "embeddings"),
        (request(prompt_is_token_ids=[True, False]), "embeddings"),
        (request(resumable=True), "streaming input"),
    ],
)
def test_refusal_names_the_field(bad: EngineCoreRequest, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        validate_request(bad, LIMITS)
    assert caught.value.code == "validation_error" and not caught.value.retryable


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"min_tokens": -1},
        {"min_tokens": 4, "max_tokens": 3},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logprobs": -2},
        {"logprobs": 101},
        {"prompt_logprobs": -2},
        {"structured_outputs": {"json": "{}"}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [100]},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"eos_token_id": 1 << 31},
        {"eos_token_id": -(1 << 40)},
        {"logprob_token_ids": [500]},
    ],
)
def test_refusal_names_the_sampling_parameter(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        validate_request(request(params=SamplingParams(**params)), LIMITS)


def test_defaults_of_both_front_ends_pass() -> None:
    validate_request(request(params=SamplingParams(extra_args=nested(64))), LIMITS)
    validate_request(request(params=SamplingParams(top_k=-1, logprobs=-1, min_tokens=0)), LIMITS)
    validate_request(request(params=SamplingParams(max_tokens=None, top_k=0, temperature=0.0)), LIMITS)
    validate_request(request(params=SamplingParams(eos_token_id=LIMITS.num_token_ids)), LIMITS)


def test_prompt_logprobs_of_a_giant_prompt_are_refused() -> None:
    limits = RequestLimits(max_model_len=1_000, max_kv_tokens=10_000, vocab_size=200_000)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        validate_request(request((1,) * 500, SamplingParams(prompt_logprobs=-1)), limits)
