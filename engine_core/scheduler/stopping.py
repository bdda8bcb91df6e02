"""When a request ends, in vLLM 0.33's order of rules."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.protocol import FinishReason
from engine_core.request import Request
from executor.sampling_params import RepetitionDetectionParams

Stop = tuple[FinishReason, "int | str | None"]  # and the stop reason


def check_stop(request: Request, token: int, num_known: int, limit: int, tail: Sequence[int]) -> Stop | None:
    """Whether `token`, the last of the request's `num_known` tokens, ends it.

    `limit` is the number of tokens at which the length ends it. `tail` are its last output tokens, enough
    of them for the request's repetition detection.
    """
    params = request.params
    if token == params.eos_token_id:
        return FinishReason.STOP, None
    if request.stop_token_ids is not None and token in request.stop_token_ids:
        return FinishReason.STOP, token
    if num_known >= limit:
        return FinishReason.LENGTH, None
    if num_known - request.num_prompt_tokens < params.min_tokens:
        return None
    if params.repetition_detection is not None and repeats(tail, params.repetition_detection):
        return FinishReason.REPETITION, "repetition_detected"
    return None


def repetition_window(params: RepetitionDetectionParams) -> int:
    """Output tokens that `repeats` looks at, at most."""
    return max(0, params.max_pattern_size) * max(0, params.min_count)


def repeats(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether `tokens` end with `min_count` copies of a pattern of an allowed size."""
    smallest, largest, count = max(1, params.min_pattern_size), params.max_pattern_size, params.min_count
    if count < 2:
        return False
    for size in range(smallest, largest + 1):
        if size * count > len(tokens):
            return False
        window = tokens[len(tokens) - size * count :]
        if window[size:] == window[:-size]:
            return True
    return False
