"""How a request's tokens are chosen and when it stops, as vLLM 0.33's front ends send it.

A sparse msgpack map: an absent key means the default, unknown keys are ignored (the front end's own
concerns: `n`, `stop`, `detokenize`, ...). The struct travels unchanged from the front end to the workers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RepetitionDetectionParams(msgspec.Struct, kw_only=True):
    """Stop when the output's tail repeats a pattern `min_count` times."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=False):
    """The keys of vLLM's `SamplingParams` that concern an engine or a worker."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    eos_token_id: int | None = msgspec.field(name="_eos_token_id", default=None)
    # Masked while fewer than `min_tokens` tokens are out; not a stop list.
    all_stop_token_ids: list[int] = msgspec.field(name="_all_stop_token_ids", default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = msgspec.field(name="_bad_words_token_ids", default=None)
    structured_outputs: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: dict[str, Any] | None = None
