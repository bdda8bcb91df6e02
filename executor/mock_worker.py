"""A worker without a model whose every token proves that the engine kept its books.

It has a real paged KV cache: for each position, the 64-bit digest of the whole prefix
(`executor.mock_model`), at `block_table[slot][position // block_size] * block_size + position % block_size`.
Position i's digest is computed from what the cache holds for position i - 1, so a wrong block table, a stale
block, a false prefix hit or a lost token changes the output, and every output can be checked against
`mock_tokens(prompt, n)`. What is wrong before any token is computed raises: a block id out of range, data in
the null block, a block that two requests would write.

Sampling parameters are ignored, except that `logprobs`, `prompt_logprobs` and `logprob_token_ids` are
answered with `mock_model`'s invented distribution.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from executor.batch_state import BatchState
from executor.block_ledger import BlockLedger
from executor.config import ExecutorConfig
from executor.mock_model import (
    DEFAULT_VOCAB_SIZE,
    SEED,
    UInt64s,
    chain,
    judge,
    judge_given,
    sampled,
)
from executor.sampling_params import SamplingParams
from executor.step import (
    Int32s,
    Logprobs,
    LoRARequest,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
)
from executor.worker import ModelInfo, Worker

_Time = Annotated[float, Meta(ge=0.0, le=1e9)]  # in the unit of its name


class MockOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`worker_options` of the mock. A step takes the sum of the three times, or longer if computing it
    does."""

    vocab_size: Annotated[int, Meta(ge=1, le=1 << 31)] = DEFAULT_VOCAB_SIZE
    mock_num_blocks: Annotated[int, Meta(ge=1)] = 1 << 19
    mock_max_model_len: Annotated[int, Meta(ge=1)] = 1 << 17
    mock_step_ms: _Time = 0.0
    mock_prefill_us_per_token: _Time = 0.0
    mock_decode_us_per_seq: _Time = 0.0
    # The step's time is multiplied by 1 ± up to this.
    mock_jitter: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    mock_seed: Annotated[int, Meta(ge=0)] = 0  # of the jitter


class MockWorker(Worker):
    """See the module. Every rank computes the same."""

    def __init__(self, config: ExecutorConfig, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self.options = msgspec.convert(config.worker_options, MockOptions, strict=False)
        self._jitter = np.random.default_rng(self.options.mock_seed)
        self._answers: dict[int, SamplingParams] = {}  # slots that want log-probs
        self.loras: set[int] = set()

    def init_device(self) -> None:
        pass

    def load_model(self) -> ModelInfo:
        return ModelInfo(self.options.vocab_size, self.options.mock_max_model_len)

    def kv_cache_capacity(self) -> int:
        return self.options.mock_num_blocks

    def initialize_cache(self, num_blocks: int) -> None:
        self._num_slots = num_blocks * self.config.block_size
        self.kv_cache = np.zeros(self._num_slots, np.uint64)
        self.ledger = BlockLedger(num_blocks, self.config.max_num_seqs)

    def sleep(self, level: int = 1) -> None:
        self.release_kv_cache()

    def release_kv_cache(self) -> None:
        self.kv_cache = np.empty(0, np.uint64)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if (tags is None or "kv_cache" in tags) and not len(self.kv_cache):
            self.kv_cache = np.zeros(self._num_slots, np.uint64)

    def add_lora(self, lora: LoRARequest | list[Any]) -> bool:
        """Adapters change nothing here, but are kept account of."""
        lora_id = msgspec.convert(lora, LoRARequest).int_id
        is_new = lora_id not in self.loras
        self.loras.add(lora_id)
        return is_new

    def remove_lora(self, lora_id: int) -> bool:
        was_there = lora_id in self.loras
        self.loras.discard(lora_id)
        return was_there

    def pin_lora(self, lora_id: int) -> bool:
        return lora_id in self.loras

    def list_loras(self) -> list[int]:
        return sorted(self.loras)

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        started = time.monotonic()
        self._take_in(step)
        last = self._compute(step, batch)
        samples = batch.samples(step)
        tokens = sampled(last, self.options.vocab_size)
        output = ModelRunnerOutput(step.step_id, tokens[:, None], samples.astype(np.int32))
        if self._answers:
            self._judge(step, batch, output, last)
        self._wait_until(started + self._duration_s(step))
        return output

    def _take_in(self, step: SchedulerOutput) -> None:
        for slots in (step.finished_slots, step.preempted_slots):
            self.ledger.release(slots)
            for slot in slots.tolist():
                self._answers.pop(slot, None)
        # Before the new requests: they may read blocks that this very step gives to others and fills.
        if len(step.new_block_slots):
            self.ledger.extend(step.new_block_slots, step.new_block_ids)
            self._wipe(step.new_block_ids)
        for request in step.new_requests:
            num_hit = request.num_computed_tokens // self.config.block_size
            owned = request.block_ids[num_hit:]
            self.ledger.admit(request.slot, request.block_ids[:num_hit], owned)
            self._wipe(owned)
            params = request.params
            if (params.logprobs, params.prompt_logprobs, params.logprob_token_ids) != (None, None, None):
                self._answers[request.slot] = params

    def _wipe(self, block_ids: Int32s) -> None:
        """Of a block's earlier life nothing may be read."""
        self.kv_cache.reshape(-1, self.config.block_size)[block_ids] = 0

    def _compute(self, step: SchedulerOutput, batch: BatchState) -> UInt64s:
        """Compute and store all scheduled tokens. Returns the digest after each row's last one. (n,)

        A request that enters with a prefix hit may read what another row writes in this very step, so such
        rows come after all others, and one by one in scheduling order if they feed each other.
        """
        hits = {r.slot: r for r in step.new_requests if r.num_computed_tokens}
        if not hits:
            return self._compute_rows(step, batch)
        is_hit = np.isin(step.slots, list(hits))
        last = np.empty(len(step.slots), np.uint64)
        last[~is_hit] = self._compute_rows(_rows_of(step, ~is_hit), batch)
        for row in np.flatnonzero(is_hit).tolist():
            request = hits[int(step.slots[row])]
            one = slice(row, row + 1)
            last[one] = self._compute_hit(_rows_of(step, one), batch, request.num_computed_tokens)
        return last

    def _compute_rows(self, step: SchedulerOutput, batch: BatchState) -> UInt64s:
        computed = step.num_computed_tokens
        # A row that begins reads its own first position instead of position -1, and drops what it read.
        before = self.kv_cache[batch.kv_slots(step.slots, np.maximum(computed - 1, 0))]
        before[computed == 0] = SEED
        return self._continue(step, batch, before)

    def _compute_hit(self, step: SchedulerOutput, batch: BatchState, num_hit: int) -> UInt64s:
        """As `_compute_rows` for one row, which trusts no block of its prefix hit unread."""
        slot = int(step.slots[0])
        positions = np.arange(num_hit, dtype=np.int32)
        found = self.kv_cache[batch.kv_slots(np.full(num_hit, slot, np.int32), positions)]
        right = chain(np.array([SEED], np.uint64), batch.token_ids[slot, :num_hit], np.array([num_hit]))
        wrong = found != right
        # The first position that holds another prefix spoils all that follows.
        before = found[wrong.argmax()] if wrong.any() else found[-1]
        return self._continue(step, batch, np.array([before], np.uint64))

    def _continue(self, step: SchedulerOutput, batch: BatchState, before: UInt64s) -> UInt64s:
        slots, positions = batch.token_slots(step), batch.positions(step)
        digests = chain(before, batch.token_ids[slots, positions], step.num_scheduled_tokens)
        self.kv_cache[batch.kv_slots(slots, positions)] = digests
        return digests[np.cumsum(step.num_scheduled_tokens) - 1]

    def _judge(
        self, step: SchedulerOutput, batch: BatchState, output: ModelRunnerOutput, last: UInt64s
    ) -> None:
        vocab_size = self.options.vocab_size
        asked: list[tuple[int, SamplingParams]] = []
        for row, slot in enumerate(step.slots.tolist()):
            params = self._answers.get(slot)
            if params is None:
                continue
            if output.num_sampled[row] and (params.logprobs is not None or params.logprob_token_ids):
                asked.append((row, params))
            if params.prompt_logprobs is not None:
                lines = self._judge_prompt(
                    step, batch, row, _num_likeliest(params.prompt_logprobs, vocab_size)
                )
                if lines is not None:
                    output.prompt_logprobs.append(lines)
        if not asked:
            return
        rows = np.array([row for row, _ in asked], np.int32)
        tokens = output.sampled_token_ids[rows, 0]
        width = max(_num_columns(params, vocab_size) for _, params in asked)
        ids, logprobs, ranks = judge(last[rows], tokens, width, vocab_size)
        for line, (_, params) in enumerate(asked):
            if params.logprob_token_ids:
                given = np.array([params.logprob_token_ids], np.int32)
                one = slice(line, line + 1)
                columns = slice(0, 1 + given.shape[1])
                ids[one, columns], logprobs[one, columns] = judge_given(
                    last[rows[one]], tokens[one], given, vocab_size
                )
        output.logprobs = Logprobs(rows, ids, logprobs, ranks)

    def _judge_prompt(
        self, step: SchedulerOutput, batch: BatchState, row: int, num_likeliest: int
    ) -> PromptLogprobs | None:
        slot = int(step.slots[row])
        first = int(step.num_computed_tokens[row])
        end = min(first + int(step.num_scheduled_tokens[row]), int(batch.num_prompt_tokens[slot]) - 1)
        if first >= end:
            return None
        positions = np.arange(first, end, dtype=np.int32)
        digests = self.kv_cache[batch.kv_slots(np.full(len(positions), slot, np.int32), positions)]
        tokens = batch.token_ids[slot, first + 1 : end + 1]
        return PromptLogprobs(row, *judge(digests, tokens, num_likeliest, self.options.vocab_size))

    def _duration_s(self, step: SchedulerOutput) -> float:
        options = self.options
        duration = options.mock_step_ms * 1e-3
        if options.mock_prefill_us_per_token or options.mock_decode_us_per_seq:
            decodes = int(np.count_nonzero(step.num_scheduled_tokens == 1))
            prefill_tokens = step.total_num_scheduled_tokens - decodes
            duration += options.mock_prefill_us_per_token * prefill_tokens * 1e-6
            duration += options.mock_decode_us_per_seq * decodes * 1e-6
        if options.mock_jitter:
            duration *= 1 + options.mock_jitter * self._jitter.uniform(-1, 1)
        return duration

    def _wait_until(self, when: float) -> None:
        remaining = when - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)


def _rows_of(step: SchedulerOutput, rows: slice | np.ndarray) -> SchedulerOutput:
    """The step reduced to some of its rows, to compute with; deltas are left out."""
    return SchedulerOutput(
        step.step_id,
        step.slots[rows],
        step.num_scheduled_tokens[rows],
        step.num_computed_tokens[rows],
    )


def _num_likeliest(asked: int, vocab_size: int) -> int:
    return vocab_size if asked == -1 else min(asked, vocab_size)


def _num_columns(params: SamplingParams, vocab_size: int) -> int:
    """Columns beside the sampled token. `logprob_token_ids` replaces the most likely ones, as in vLLM
    0.33."""
    if params.logprob_token_ids:
        return len(params.logprob_token_ids)
    return _num_likeliest(params.logprobs or 0, vocab_size)
