"""What a request must satisfy to be served. Refusals name the field and the value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_core.errors import RequestError
from engine_core.protocol import EngineCoreRequest
from engine_core.tokens import token_array
from executor.sampling_params import SamplingParams

VALIDATION_ERROR = "validation_error"
DEADLINE_EXCEEDED = "deadline_exceeded"
# Log-probs of a whole prompt leave in one message, whose size must have a bound: 128 MiB here.
MAX_PROMPT_LOGPROB_ENTRIES = 16 << 20
MAX_NESTING = 64  # of extra_args, which the workers are sent
MAX_REQUEST_ID_CHARS = 4096  # it is repeated in every output


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model, the KV cache and the configuration allow."""

    max_model_len: int  # tokens of prompt and output
    max_kv_tokens: int  # tokens that the whole KV cache holds
    vocab_size: int | None = None  # token ids are below; None: not checked
    max_loras: int = 0  # 0: no adapters

    @property
    def num_token_ids(self) -> int:
        return 1 << 31 if self.vocab_size is None else self.vocab_size

    @property
    def max_payload_bytes(self) -> int:
        """A longer frame 0 cannot be a request that fits: 9 bytes for a token, and room for the rest."""
        return 9 * self.max_model_len + (4 << 20)


def validate_request(
    request: EngineCoreRequest, limits: RequestLimits
) -> tuple[npt.NDArray[np.int32], SamplingParams]:
    """The prompt and how to sample, if the request can be served.

    Raises `RequestError` with code "validation_error".
    """
    if not request.request_id:
        raise _refusal("request_id is empty")
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise _refusal(
            f"request_id has {len(request.request_id)} characters, at most {MAX_REQUEST_ID_CHARS} are allowed"
        )
    if not math.isfinite(request.arrival_time):
        raise _refusal(f"arrival_time = {request.arrival_time} has no place in the order of arrival")
    _refuse_unsupported(request)
    params = request.sampling_params
    if params is None:
        raise _refusal("sampling_params is missing")
    if params.extra_args is not None and _is_nested(params.extra_args, MAX_NESTING):
        raise _refusal(f"extra_args is nested more than {MAX_NESTING} deep")
    prompt = _prompt_tokens(request.prompt_token_ids, limits)
    _check_lengths(params, len(prompt), limits)
    _check_sampling(params, limits)
    if request.lora_request is not None and not limits.max_loras:
        raise _refusal("lora_request: adapters are not enabled on this engine (--enable-lora)")
    return prompt, params


def _is_nested(value: object, depth: int) -> bool:
    """Whether more than `depth` containers are in one another."""
    if isinstance(value, dict):
        return not depth or any(_is_nested(part, depth - 1) for part in value.values())
    if isinstance(value, (list, tuple)):
        return not depth or any(_is_nested(part, depth - 1) for part in value)
    return False


def check_prompt_length(num_tokens: int, limits: RequestLimits) -> None:
    """Raises `RequestError` for a prompt that could never run."""
    if num_tokens >= limits.max_model_len:
        raise _refusal(
            f"prompt_token_ids has {num_tokens} tokens and leaves no room for output: "
            f"max_model_len is {limits.max_model_len}"
        )
    if num_tokens > limits.max_kv_tokens:
        raise _refusal(
            f"prompt_token_ids has {num_tokens} tokens, but the whole KV cache holds {limits.max_kv_tokens}"
        )


def deadline_of(params: SamplingParams) -> float | None:
    """Seconds that a request has, from `extra_args`. Raises `RequestError` if it has none."""
    deadline_s = (params.extra_args or {}).get("deadline_s")
    if deadline_s is None:
        return None
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or math.isnan(deadline_s):
        raise _refusal(f"deadline_s = {deadline_s!r} must be a number of seconds")
    if deadline_s <= 0:
        raise RequestError(DEADLINE_EXCEEDED, f"deadline_s = {deadline_s}: there is no time left")
    return float(deadline_s)


def _refusal(message: str) -> RequestError:
    return RequestError(VALIDATION_ERROR, message)


def _refuse_unsupported(request: EngineCoreRequest) -> None:
    if request.mm_features:
        raise _refusal("mm_features: multi-modal input is not supported")
    if request.pooling_params is not None:
        raise _refusal("pooling_params: pooling is not supported, only generation")
    if request.prompt_embeds is not None:
        raise _refusal("prompt_embeds: prompts are token ids; embeddings are not supported")
    if request.prompt_is_token_ids is not None and not all(request.prompt_is_token_ids):
        raise _refusal("prompt_is_token_ids: prompts are token ids; embeddings are not supported")
    if request.resumable:
        raise _refusal("resumable: streaming input is not supported")


def _prompt_tokens(tokens: list[int] | bytes | None, limits: RequestLimits) -> npt.NDArray[np.int32]:
    if not tokens:
        raise _refusal("prompt_token_ids is empty")
    check_prompt_length(len(tokens) // 4 if isinstance(tokens, bytes) else len(tokens), limits)
    if isinstance(tokens, bytes):
        if len(tokens) % 4:
            raise _refusal(f"prompt_token_ids has {len(tokens)} bytes, not a multiple of 4")
        prompt = np.frombuffer(tokens, "<i4")
    else:
        try:
            prompt = token_array(tokens)
        except OverflowError:
            raise _outside_vocabulary(tokens, limits) from None
    # As unsigned numbers the negative ones are too large as well.
    if int(prompt.view(np.uint32).max()) >= limits.num_token_ids:
        raise _outside_vocabulary(prompt.tolist(), limits)
    return prompt


def _outside_vocabulary(
    tokens: list[int], limits: RequestLimits, field: str = "prompt_token_ids"
) -> RequestError:
    index, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < limits.num_token_ids)
    return _refusal(f"{field}[{index}] = {token} is outside the vocabulary of {limits.num_token_ids} tokens")


def _check_lengths(params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise _refusal(f"max_tokens = {params.max_tokens} must be at least 1")
    if params.min_tokens < 0:
        raise _refusal(f"min_tokens = {params.min_tokens} must not be negative")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refusal(f"min_tokens = {params.min_tokens} exceeds max_tokens = {params.max_tokens}")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not -1 <= count <= limits.num_token_ids:
            most = limits.num_token_ids
            raise _refusal(f"{name} = {count} must be -1 (the whole vocabulary) or 0 to {most}")
    if params.prompt_logprobs is not None:
        columns = limits.num_token_ids if params.prompt_logprobs == -1 else params.prompt_logprobs + 1
        if columns * num_prompt_tokens > MAX_PROMPT_LOGPROB_ENTRIES:
            raise _refusal(
                f"prompt_logprobs = {params.prompt_logprobs} for {num_prompt_tokens} prompt tokens makes "
                f"{columns * num_prompt_tokens} entries, more than {MAX_PROMPT_LOGPROB_ENTRIES}"
            )


def _check_sampling(params: SamplingParams, limits: RequestLimits) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0.0):
        raise _refusal(f"temperature = {params.temperature} must be a finite number, not negative")
    if not 0.0 < params.top_p <= 1.0:
        raise _refusal(f"top_p = {params.top_p} must be above 0 and at most 1")
    if params.top_k < -1:
        raise _refusal(f"top_k = {params.top_k} must be -1 or 0 (off), or positive")
    if not 0.0 <= params.min_p <= 1.0:
        raise _refusal(f"min_p = {params.min_p} must be from 0 to 1")
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0.0):
        raise _refusal(f"repetition_penalty = {params.repetition_penalty} must be above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise _refusal(f"{name} = {getattr(params, name)} must be a finite number")
    # One outside the vocabulary is harmless: some models' files name such a token.
    if params.eos_token_id is not None and not -(1 << 31) <= params.eos_token_id < 1 << 31:
        raise _refusal(f"eos_token_id = {params.eos_token_id} is no token id")
    if params.structured_outputs is not None:
        raise _refusal("structured_outputs: structured output is not supported")
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise _refusal("allowed_token_ids is empty: no token could be sampled")
        _check_ids("allowed_token_ids", params.allowed_token_ids, limits)
    if params.logit_bias:
        _check_ids("logit_bias", list(params.logit_bias), limits)
        for token, bias in params.logit_bias.items():
            if math.isnan(bias):
                raise _refusal(f"logit_bias[{token}] = nan must be a number")
    if params.logprob_token_ids:
        _check_ids("logprob_token_ids", params.logprob_token_ids, limits)
    for words in params.bad_words_token_ids or ():
        _check_ids("bad_words", words, limits)


def _check_ids(field: str, tokens: list[int], limits: RequestLimits) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.num_token_ids):
        raise _outside_vocabulary(tokens, limits, field)
