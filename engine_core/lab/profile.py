"""Measures how long a worker's steps take, over a grid of what they hold.

The steps are like those that the engine sends: rows that decode after a context of their own, beside a row
that computes a chunk of a prompt after a context of the same length. The context is really computed before.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from engine_core.config import EngineConfig
from engine_core.lab.latency import TABLE_FORMAT, LatencyTable
from executor.base import EngineCapacity, Executor
from executor.sampling_params import SamplingParams
from executor.step import EMPTY, Int32s, NewRequest, SchedulerOutput
from transport.clock import Clock


class GridError(ValueError):
    """A grid does not fit the engine's configuration or the worker's capacity."""


class Grid:
    """The points to measure: each combination of the three axes."""

    def __init__(
        self, prefill_tokens: list[int], decode_seqs: list[int], context: list[int], repeats: int
    ) -> None:
        """Axes in any order; 0 prefill tokens and 0 decoding rows are always among them.

        Contexts are at least one token: a row that decodes has a token before.
        """
        self.prefill_tokens = sorted({0, *prefill_tokens})
        self.decode_seqs = sorted({0, *decode_seqs})
        self.context = sorted(set(context))
        self.repeats = repeats
        if self.context[0] < 1 or self.prefill_tokens[0] < 0 or self.decode_seqs[0] < 0:
            raise GridError("contexts begin at 1, prefill tokens and decoding rows at 0")
        if 1 in self.prefill_tokens:
            raise GridError("a chunk of one token counts as decoding; prefill tokens begin at 2")

    @property
    def tokens_per_row(self) -> int:
        """Known tokens of a row that decodes through all steps of a context."""
        return self.context[-1] + len(self.prefill_tokens) * (self.repeats + 1) + 1

    def check(self, config: EngineConfig, capacity: EngineCapacity) -> None:
        """Raises `GridError` if the points cannot be measured."""
        rows, tokens = self.decode_seqs[-1], self.prefill_tokens[-1]
        if rows + 1 > config.max_num_seqs:
            raise GridError(f"{rows} decoding rows and one more need --max-num-seqs {rows + 1}")
        if rows + tokens > config.max_num_batched_tokens:
            raise GridError(
                f"{tokens} prefill tokens beside {rows} rows need --max-num-batched-tokens {rows + tokens}"
            )
        longest = max(self.tokens_per_row, self.context[-1] + tokens + 1)
        if longest > capacity.max_model_len:
            raise GridError(f"{longest} tokens of a row exceed the model's {capacity.max_model_len}")
        size = config.block_size
        needed = 1 + max(rows, 1) * -(-self.tokens_per_row // size) - (-(self.context[-1] + tokens) // size)
        if needed > capacity.num_gpu_blocks:
            raise GridError(f"the grid needs {needed} KV blocks, the worker has {capacity.num_gpu_blocks}")


def measure(
    executor: Executor,
    capacity: EngineCapacity,
    config: EngineConfig,
    grid: Grid,
    clock: Clock,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyTable:
    """The median of `grid.repeats` steps at each point, after one that is not counted.

    `executor` is initialized. `on_progress` is told how many of how many contexts and batch sizes are done.
    Raises `GridError`, and `ExecutorError` if the worker fails.
    """
    grid.check(config, capacity)
    step_s = np.zeros((len(grid.prefill_tokens), len(grid.decode_seqs), len(grid.context)))
    total = len(grid.decode_seqs) * len(grid.context)
    batch = _Batch(executor, capacity, config, clock)
    for at_context, context in enumerate(grid.context):
        for at_rows, rows in enumerate(grid.decode_seqs):
            batch.fill(max(rows, 1), context, grid.tokens_per_row)
            for at_tokens, tokens in enumerate(grid.prefill_tokens):
                if rows or tokens:
                    times = [batch.time_step(rows, tokens) for _ in range(grid.repeats + 1)]
                    step_s[at_tokens, at_rows, at_context] = median(times[1:])
            on_progress(at_context * len(grid.decode_seqs) + at_rows + 1, total)
    if len(grid.prefill_tokens) > 1 and len(grid.decode_seqs) > 1:
        # No step is empty, but what one costs at least is the corner that small steps are interpolated from.
        step_s[0, 0] = np.maximum(step_s[0, 1] + step_s[1, 0] - step_s[1, 1], 0.0)
    return LatencyTable(
        format=TABLE_FORMAT,
        worker_cls=config.worker_cls,
        model=config.model,
        prefill_tokens=grid.prefill_tokens,
        decode_seqs=grid.decode_seqs,
        context=grid.context,
        step_s=step_s.tolist(),
    )


class _Batch:
    """Rows in slots 0 .. n - 1 with a context each; the chunk of a prompt has the slot behind them."""

    def __init__(
        self, executor: Executor, capacity: EngineCapacity, config: EngineConfig, clock: Clock
    ) -> None:
        self._executor = executor
        self._config = config
        self._clock = clock
        self._vocab_size = capacity.vocab_size
        self._rng = np.random.default_rng(config.seed)
        self._step_id = 0
        self._computed: Int32s = EMPTY  # tokens of each row
        self._context = 0
        self._next_block = 1
        self._leaving: list[int] = []  # slots to announce as finished

    def fill(self, rows: int, context: int, room: int) -> None:
        """Replace all rows by `rows` new ones with `context` tokens computed, and blocks for `room`."""
        self._leaving += range(len(self._computed))
        self._computed = np.zeros(0, np.int32)
        self._context = context
        self._next_block = 1
        budget = self._config.max_num_batched_tokens
        for slot in range(rows):
            blocks = self._take_blocks(room)
            request = self._request(slot, self._tokens(context), 0, blocks)
            done = 0
            while done < context:
                count = min(budget, context - done)
                self._run([slot], [count], [done], [] if done else [request])
                done += count
        self._computed = np.full(rows, context, np.int32)

    def time_step(self, rows: int, tokens: int) -> float:
        """Seconds of a step in which the first `rows` rows decode and `tokens` of a prompt are computed."""
        slots, counts = list(range(rows)), [1] * rows
        computed = self._computed[:rows].tolist()
        new = []
        before = self._next_block
        if tokens:
            slot = len(self._computed)
            # It reads what the first row has computed of its context, in whole blocks, and owns the rest.
            size = self._config.block_size
            shared = self._context // size
            known = self._tokens(shared * size + tokens)
            blocks = np.concatenate((np.arange(1, 1 + shared, dtype=np.int32), self._take_blocks(tokens)))
            new = [self._request(slot, known, shared * size, blocks)]
            slots, counts, computed = [*slots, slot], [*counts, tokens], [*computed, shared * size]
        seconds = self._run(slots, counts, computed, new)
        self._computed[:rows] += 1
        if tokens:
            self._leaving.append(len(self._computed))
            self._next_block = before
        return seconds

    def _run(self, slots: list[int], counts: list[int], computed: list[int], new: list[NewRequest]) -> float:
        self._step_id += 1
        step = SchedulerOutput(
            self._step_id,
            np.array(slots, np.int32),
            np.array(counts, np.int32),
            np.array(computed, np.int32),
            new,
            finished_slots=np.array(self._leaving, np.int32),
        )
        self._leaving = []
        begun_s = self._clock.monotonic()
        self._executor.execute_model(step)
        return self._clock.monotonic() - begun_s

    def _request(self, slot: int, tokens: Int32s, computed: int, blocks: Int32s) -> NewRequest:
        params = SamplingParams(temperature=0.0, max_tokens=None)
        return NewRequest(
            slot, f"profile-{self._step_id}-{slot}", tokens, len(tokens), computed, blocks, params
        )

    def _take_blocks(self, tokens: int) -> Int32s:
        first = self._next_block
        self._next_block += -(-tokens // self._config.block_size)
        return np.arange(first, self._next_block, dtype=np.int32)

    def _tokens(self, count: int) -> Int32s:
        return self._rng.integers(0, self._vocab_size, count, dtype=np.int32)
