"""Sampling for worker authors: logits in, a step's `ModelRunnerOutput` out.

    sampler = Sampler(vocab_size, config.max_num_seqs, config.seed)
    ...
    return sampler.sample(logits, step, batch)  # logits of the rows that sample

The order of operations is vLLM's: log-probs are taken from the raw logits; then allowed tokens, bad words,
`min_tokens`, `logit_bias`, penalties (repetition, frequency, presence); greedy rows take the maximum (the
lowest id among equals); the others divide by the temperature, then `min_p`, `top_k`, `top_p`, and draw. Bad
words and stops that leave no token at all are let through.

A draw depends on the logits, the request's seed and how many tokens it has out: not on the batch, on
chunking, or on preemption. Requests without a seed get one from the engine's seed and their id. So all
tensor-parallel ranks that hold the same logits sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from executor.batch_state import BatchState
from executor.sampling_ops import (
    LOGITS_AT_ONCE,
    draw,
    draw_filtered,
    log_softmax,
    penalise,
    top_ids,
    uniforms,
)
from executor.sampling_params import SamplingParams
from executor.step import Float32s, Int32s, Logprobs, ModelRunnerOutput, PromptLogprobs, SchedulerOutput

GREEDY_BELOW = 1e-5  # temperatures; vLLM's bound

# What a request asks for beyond the likeliest token.
_RANDOM, _FILTERED, _PENALISED, _EDITED, _LOGPROBS, _PROMPT_LOGPROBS = 1, 2, 4, 8, 16, 32


@dataclass(slots=True)
class _Edits:
    """A request's rules about single tokens. Ids outside the vocabulary are left out."""

    allowed: Int32s | None
    bad_words: list[tuple[list[int], int]]  # the tokens before, and the one not to follow them
    min_tokens: int
    stop_ids: Int32s  # not before `min_tokens`
    bias_ids: Int32s
    biases: Float32s


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A row of a step whose prompt log-probs are due."""

    row: int
    tokens: slice  # of the step's flat tokens: those whose logits judge the next prompt token
    targets: Int32s  # (p,) the prompt tokens judged
    k: int  # how many of the most likely tokens to list


def _ban(line: Float32s, token_ids: Int32s | list[int]) -> None:
    """None of these may come, unless nothing else may."""
    kept = line[token_ids]
    line[token_ids] = -np.inf
    if np.isneginf(line).all():
        line[token_ids] = kept


class Sampler:
    """Keeps what the requests of a batch asked for, by slot. One instance a rank, used by one thread.

    `seed` is the engine's; every rank must have the same.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._engine_key = (seed % (1 << 64)).to_bytes(8, "little")
        self._wants = np.zeros(max_num_seqs, np.uint8)
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._stream = np.zeros(max_num_seqs, np.uint64)  # keeps given and made seeds apart
        self._edits: list[_Edits | None] = [None] * max_num_seqs
        # Of penalised slots: how often each token is in the output, counted up to so many known tokens.
        self._output_counts = np.zeros((max_num_seqs, vocab_size), np.int32)
        self._counted = np.zeros(max_num_seqs, np.int32)

    def sample(self, logits: Float32s, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        """Sample one token for each row that samples. Call it for every step, with `batch` as it was given.

        `logits` (m, vocab_size) float32, C-contiguous: one line for each row of `batch.samples(step)`, in
        their order; its content is used up. Prompt log-probs are added by the caller (`prompt_spans`).
        """
        for request in step.new_requests:
            self._admit(request.slot, request.request_id, request.params, batch)
        rows = np.flatnonzero(batch.samples(step))
        if logits.shape != (len(rows), self.vocab_size) or logits.dtype != np.float32:
            raise ValueError(
                f"logits are {logits.dtype} {logits.shape}, not float32 {(len(rows), self.vocab_size)}"
            )
        sampled = np.zeros((len(step.slots), 1), np.int32)
        num_sampled = np.zeros(len(step.slots), np.int32)
        logprobs = None
        if len(rows):
            slots = step.slots[rows]
            wants = self._wants[slots]
            judged = np.flatnonzero(wants & _LOGPROBS)
            raw = logits[judged] if len(judged) else None
            tokens = self._choose(logits, slots, wants, batch)
            sampled[rows, 0] = tokens
            num_sampled[rows] = 1
            if raw is not None:
                params = [batch.params[slot] for slot in slots[judged].tolist()]
                logprobs = self._logprobs(raw, rows[judged].astype(np.int32), tokens[judged], params)
        return ModelRunnerOutput(step.step_id, sampled, num_sampled, logprobs)

    def prompt_spans(self, step: SchedulerOutput, batch: BatchState) -> list[PromptSpan]:
        """What prompt log-probs this step owes. For each, append `prompt_logprobs` to the output's list.

        Call it after `sample`.
        """
        wanted = np.flatnonzero(self._wants[step.slots] & _PROMPT_LOGPROBS)
        if not len(wanted):
            return []
        spans = []
        starts = batch.query_start_loc(step)
        for row in wanted.tolist():
            slot = int(step.slots[row])
            first = int(step.num_computed_tokens[row])
            end = min(first + int(step.num_scheduled_tokens[row]), int(batch.num_prompt_tokens[slot]) - 1)
            params = batch.params[slot]
            if end <= first or params is None or params.prompt_logprobs is None:
                continue
            begin = int(starts[row])
            targets = batch.token_ids[slot, first + 1 : end + 1].copy()
            spans.append(
                PromptSpan(row, slice(begin, begin + end - first), targets, self._k(params.prompt_logprobs))
            )
        return spans

    def prompt_logprobs(self, span: PromptSpan, logits_of: Callable[[slice], Float32s]) -> PromptLogprobs:
        """The log-probs of one span. `logits_of(tokens)` gives the logits (p, vocab_size) after flat tokens
        of the
        step; it is asked for a few at a time, because a whole chunk's would fill the memory."""
        at_once = max(1, LOGITS_AT_ONCE // self.vocab_size)
        parts = []
        for start in range(0, len(span.targets), at_once):
            targets = span.targets[start : start + at_once]
            begin = span.tokens.start + start
            logprobs = log_softmax(logits_of(slice(begin, begin + len(targets))))
            parts.append(_lines(logprobs, targets, top_ids(logprobs, span.k)))
        token_ids, values, ranks = (np.concatenate(part) for part in zip(*parts, strict=True))
        return PromptLogprobs(span.row, token_ids, values, ranks)

    def _admit(self, slot: int, request_id: str, params: SamplingParams, batch: BatchState) -> None:
        random = params.temperature >= GREEDY_BELOW
        penalised = bool(
            params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        )
        edits = self._edits_of(params)
        self._wants[slot] = (
            _RANDOM * random
            | _FILTERED * (random and (params.top_k > 0 or params.top_p < 1))
            | _PENALISED * penalised
            | _EDITED * (edits is not None)
            | _LOGPROBS * (params.logprobs is not None or bool(params.logprob_token_ids))
            | _PROMPT_LOGPROBS * (params.prompt_logprobs is not None)
        )
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(max(params.top_k, 0), self.vocab_size)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._repetition[slot] = params.repetition_penalty
        self._frequency[slot] = params.frequency_penalty
        self._presence[slot] = params.presence_penalty
        self._edits[slot] = edits
        if params.seed is not None:
            self._seed[slot] = params.seed % (1 << 64)
        else:
            digest = blake2b(request_id.encode(), digest_size=8, key=self._engine_key).digest()
            self._seed[slot] = int.from_bytes(digest, "little")
        self._stream[slot] = params.seed is None
        if penalised:
            self._output_counts[slot] = 0
            self._counted[slot] = batch.num_prompt_tokens[slot]

    def _edits_of(self, params: SamplingParams) -> _Edits | None:
        allowed = None if params.allowed_token_ids is None else self._ids(params.allowed_token_ids)
        bad_words = [
            (word[:-1], word[-1])
            for word in params.bad_words_token_ids or []
            if word and 0 <= word[-1] < self.vocab_size
        ]
        stop_ids = self._ids(params.all_stop_token_ids if params.min_tokens > 0 else [])
        bias = {token: b for token, b in (params.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        if allowed is None and not bad_words and not len(stop_ids) and not bias:
            return None
        return _Edits(
            allowed,
            bad_words,
            params.min_tokens,
            stop_ids,
            np.fromiter(bias.keys(), np.int32, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )

    def _ids(self, token_ids: Iterable[int]) -> Int32s:
        return np.array(sorted({t for t in token_ids if 0 <= t < self.vocab_size}), np.int32)

    def _k(self, asked: int) -> int:
        return self.vocab_size if asked < 0 else min(asked, self.vocab_size)

    def _choose(
        self, logits: Float32s, slots: Int32s, wants: npt.NDArray[np.uint8], batch: BatchState
    ) -> Int32s:
        """A token for each line of `logits`, which is changed. (m,)"""
        for line in np.flatnonzero(wants & _EDITED).tolist():
            self._edit(logits[line], int(slots[line]), batch)
        penalised = np.flatnonzero(wants & _PENALISED)
        if len(penalised):
            self._penalise(logits, penalised, slots[penalised], batch)
        random = np.flatnonzero(wants & _RANDOM)
        all_random = len(random) == len(slots)
        tokens = np.empty(len(slots), np.int64) if all_random else logits.argmax(axis=1)
        if len(random):
            filtered = (wants[random] & _FILTERED) != 0
            for lines, narrowed in ((random[~filtered], False), (random[filtered], True)):
                if len(lines):
                    tokens[lines] = self._draw(logits, lines, slots[lines], narrowed, batch)
        return tokens.astype(np.int32)

    def _draw(
        self,
        logits: Float32s,
        lines: npt.NDArray[np.intp],
        slots: Int32s,
        filtered: bool,
        batch: BatchState,
    ) -> npt.NDArray[np.int64]:
        scaled = logits if len(lines) == len(logits) else logits[lines]
        scaled /= self._temperature[slots, None]
        outputs = (batch.num_tokens[slots] - batch.num_prompt_tokens[slots]).astype(np.int64)
        uniform = uniforms(self._seed[slots], outputs, self._stream[slots])
        if filtered:
            return draw_filtered(scaled, self._min_p[slots], self._top_k[slots], self._top_p[slots], uniform)
        return draw(scaled, self._min_p[slots], uniform)

    def _edit(self, line: Float32s, slot: int, batch: BatchState) -> None:
        edits = self._edits[slot]
        assert edits is not None
        outputs = batch.token_ids[slot, batch.num_prompt_tokens[slot] : batch.num_tokens[slot]]
        if edits.allowed is not None:
            kept = line[edits.allowed]
            line[:] = -np.inf
            line[edits.allowed] = kept
        banned = [
            last
            for before, last in edits.bad_words
            if len(before) <= len(outputs) and outputs[len(outputs) - len(before) :].tolist() == before
        ]
        if banned:
            _ban(line, banned)
        if len(outputs) < edits.min_tokens and len(edits.stop_ids):
            _ban(line, edits.stop_ids)
        line[edits.bias_ids] += edits.biases

    def _penalise(
        self, logits: Float32s, lines: npt.NDArray[np.intp], slots: Int32s, batch: BatchState
    ) -> None:
        known = batch.num_tokens[slots]
        owners, new = _spans(batch.token_ids, slots, self._counted[slots], known)
        np.add.at(self._output_counts, (slots[owners], new), 1)
        self._counted[slots] = known
        # Frequency and presence concern the output alone.
        first = np.where(self._repetition[slots] == 1, batch.num_prompt_tokens[slots], 0)
        owners, seen = _spans(batch.token_ids, slots, first, known)
        inside = (seen >= 0) & (seen < self.vocab_size)
        owners, seen = owners[inside], seen[inside]
        whose = slots[owners]
        penalise(
            logits,
            lines[owners],
            seen,
            self._output_counts[whose, seen],
            self._repetition[whose],
            self._frequency[whose],
            self._presence[whose],
        )

    def _logprobs(
        self, logits: Float32s, rows: Int32s, tokens: Int32s, params: list[SamplingParams | None]
    ) -> Logprobs:
        logprobs = log_softmax(logits)
        asked: list[Int32s | int] = []
        for p in params:
            assert p is not None
            if p.logprob_token_ids:
                asked.append(np.array([t for t in p.logprob_token_ids if 0 <= t < self.vocab_size], np.int32))
            else:
                asked.append(self._k(p.logprobs or 0))
        k = max(a if isinstance(a, int) else len(a) for a in asked)
        likely = max((a for a in asked if isinstance(a, int)), default=0)
        listed = np.zeros((len(rows), k), np.int32)
        listed[:, :likely] = top_ids(logprobs, likely)
        for line, a in enumerate(asked):
            if not isinstance(a, int):
                listed[line, : len(a)] = a
        token_ids, values, ranks = _lines(logprobs, tokens, listed)
        for line, a in enumerate(asked):
            beyond = likely if isinstance(a, int) else len(a)
            token_ids[line, 1 + beyond :] = 0
            values[line, 1 + beyond :] = -np.inf
        return Logprobs(rows, token_ids, values, ranks)


def _spans(
    token_ids: Int32s, slots: Int32s, first: Int32s, end: Int32s
) -> tuple[npt.NDArray[np.intp], Int32s]:
    """The tokens `token_ids[slot, first:end]` of all slots in one array, and whose they are (an index)."""
    counts = end - first
    owners = np.repeat(np.arange(len(slots)), counts)
    columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    return owners, token_ids[slots[owners], columns]


def _lines(logprobs: Float32s, tokens: Int32s, listed: Int32s) -> tuple[Int32s, Float32s, Int32s]:
    """Token ids, log-probs (n, 1 + k) and ranks (n,) for `tokens` (n,) and the `listed` (n, k) tokens.

    The rank counts the tokens that are at least as likely, as vLLM does.
    """
    token_ids = np.concatenate([tokens[:, None], listed], axis=1)
    values = np.take_along_axis(logprobs, token_ids, axis=1)
    ranks = (logprobs >= values[:, :1]).sum(axis=1, dtype=np.int32)
    return token_ids, values, ranks
