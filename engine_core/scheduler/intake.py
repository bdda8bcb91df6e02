"""Takes in what a step sampled: new tokens to the requests, outputs to the clients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

import numpy as np
import numpy.typing as npt

from engine_core.counters import Counters
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.metrics import EngineMetrics
from engine_core.request import Request, Status
from engine_core.scheduler.admission import Admission
from engine_core.scheduler.outcome import (
    OutputCollector,
    SampledLogprobs,
    keep_prompt_logprobs,
    make_output,
)
from engine_core.scheduler.running import ALWAYS, CARE, ONCE, InFlightStep, RunningBatch
from engine_core.scheduler.running_phase import name_blocks
from engine_core.scheduler.stopping import Stop, check_stop, repetition_window
from executor.step import Int32s, ModelRunnerOutput
from transport.clock import Clock


class Intake:
    """The rows of a step are, by what became of them since it was planned:

    - of a running request: its token is appended, on columns;
    - of a request that ended: passed over;
    - of a request that was preempted (*stale*): its token is delivered all the same, or dropped if the
      request was told to start over at once.
    """

    def __init__(
        self,
        batch: RunningBatch,
        kv: KVCacheManager,
        admission: Admission,
        is_async: bool,
        end: Callable[[Request, int | None], None],
        clock: Clock,
        counters: Counters,
        metrics: EngineMetrics | None,
    ) -> None:
        """`end(request, slot)` is called for a request that ends; the slot is the one it had, if any."""
        self._batch = batch
        self._kv = kv
        self._admission = admission
        self._is_async = is_async
        self._end = end
        self._clock = clock
        self._counters = counters
        self._metrics = metrics
        self._timed: tuple[int, int] | None = None

    def take_in(self, record: InFlightStep, output: ModelRunnerOutput, collector: OutputCollector) -> None:
        """Raises ValueError if `output` does not have a row for each of the step's, or if a row sampled that
        must not, or the other way round.
        """
        requests, rows = record.requests, record.rows
        tokens = output.sampled_token_ids[:, 0].astype(np.int32)  # a copy: the message's memory is not ours
        sampled = output.num_sampled != 0
        if not len(tokens) == len(sampled) == len(requests):
            raise ValueError(
                f"step {record.step_id} has {len(requests)} rows, but its outcome {len(tokens)} tokens "
                f"and {len(sampled)} counts"
            )
        if not np.array_equal(sampled, record.samples):
            wrong = requests[int((sampled != record.samples).argmax())].request_id
            raise ValueError(
                f"the worker's outcome of step {record.step_id} is wrong for request {wrong}: a row samples "
                "if, and only if, the step computes the last of its known tokens (BatchState.samples)"
            )
        logprobs = SampledLogprobs(output.logprobs)
        for part in output.prompt_logprobs:
            if rows is None or rows[part.row] >= 0 or not requests[part.row].drop_stale_output:
                keep_prompt_logprobs(requests[part.row], part)
        if rows is None:
            if np.count_nonzero(sampled) == len(sampled):
                self._append(requests, slice(0, len(tokens)), None, tokens, logprobs, collector)
                return
            rows = record.row_list()
        for line in np.flatnonzero(rows < 0).tolist():
            if requests[line].status is not Status.FINISHED:
                token = tokens[line] if sampled[line] else None
                self._append_stale(record, line, token, logprobs, collector)
        lines = np.flatnonzero((rows >= 0) & sampled)
        if len(lines):
            where: list[int] = lines.tolist()
            mine = [requests[line] for line in where]
            self._append(mine, rows[lines], where, tokens[lines], logprobs, collector)

    def _append(
        self,
        requests: list[Request],
        rows: slice | Int32s,
        lines: list[int] | None,
        tokens: Int32s,
        logprobs: SampledLogprobs,
        collector: OutputCollector,
    ) -> None:
        """One token for each of these running requests.

        `rows` are their rows in the batch, `lines` those in the step; None: 0, 1, 2, ...
        """
        batch, kv = self._batch, self._kv
        c = batch.columns()
        row_of = _identity if isinstance(rows, slice) else rows.tolist().__getitem__
        self._counters.generation_tokens += len(requests)
        known = c.known[rows] + 1
        position = (known - 1) % batch.block_size
        batch.tail[c.slot[rows], position] = tokens
        c.known[rows] = known
        if self._is_async:
            c.placeholders[rows] -= 1
            # What this step computed is certain now, also if the request is in no later step.
            (full,) = (known > c.next_name[rows]).nonzero()
            if len(full):
                name_blocks(batch, kv, [row_of(i) for i in full.tolist()], (known[full] - 1).tolist())

        leaving: list[int] = []
        rare = (tokens == c.eos[rows]) | (known >= c.limit[rows]) | (c.care[rows] != 0)
        if batch.stop_ids:
            rare |= batch.may_stop(tokens)
        (rare_indices,) = rare.nonzero()
        if self._metrics is not None:
            # Most likely the same requests as last time; then their slots need not be looked at.
            which = (batch.version, len(requests)) if lines is None and not len(rare_indices) else None
            is_same = which is not None and which == self._timed
            if not (is_same and self._metrics.tokens_again(self._clock.monotonic())):
                once = rare_indices[c.care[rows][rare_indices] & ONCE != 0]
                self._time_tokens(self._metrics, requests, c.slot[rows], once)
                self._timed = which
        if len(rare_indices):
            care = c.care[rows][rare_indices]
            limits = c.limit[rows][rare_indices].tolist()
            for i, bits, limit in zip(rare_indices.tolist(), care.tolist(), limits, strict=True):
                row, request = row_of(i), requests[i]
                stop = self._stop(request, row, int(tokens[i]), int(known[i]), limit)
                if stop is not None or bits & (ONCE | ALWAYS):
                    line = i if lines is None else lines[i]
                    self._emit(request, int(tokens[i]), stop, line, logprobs, collector)
                    if stop is not None:
                        leaving.append(row)
                    elif bits & ONCE:
                        batch.table[CARE, row] = bits & ~ONCE
                else:
                    rare[i] = False
            plain = ~rare
            mine = list(compress(requests, plain.tolist()))
            collector.add_plain(mine, tokens[plain], c.client[rows][plain], batch.clients)
        else:
            collector.add_plain(requests, tokens, c.client[rows], batch.clients)

        (full,) = (position == batch.block_size - 1).nonzero()
        if len(full):
            filled = {row_of(i): count for i, count in zip(full.tolist(), known[full].tolist(), strict=True)}
            for row in leaving:
                filled.pop(row, None)
            self._file_blocks(filled)
        if leaving:
            gone = [(batch.requests[row], batch.requests[row].slot) for row in leaving]
            batch.remove(leaving)
            for request, slot in gone:
                self._end(request, slot)

    def _time_tokens(
        self, metrics: EngineMetrics, requests: list[Request], slots: Int32s, once: npt.NDArray[np.intp]
    ) -> None:
        """Each of these running requests, which have these `slots`, has a token. The first ones are among
        those at `once`.
        """
        now = self._clock.monotonic()
        if len(once):
            firsts = [i for i in once.tolist() if not requests[i].prefilled]
            now_unix = self._clock.time()
            for i in firsts:
                metrics.first_token(requests[i], now, now_unix)
            slots = np.delete(slots, firsts)
        metrics.tokens(slots, now)

    def _stop(self, request: Request, row: int, token: int, known: int, limit: int) -> Stop | None:
        window = request.params.repetition_detection
        if window is None:
            return check_stop(request, token, known, limit, ())
        tail = self._batch.output_tail(row, repetition_window(window))
        return check_stop(request, token, known, limit, tail)

    def _emit(
        self,
        request: Request,
        token: int,
        stop: Stop | None,
        line: int,
        logprobs: SampledLogprobs,
        collector: OutputCollector,
    ) -> None:
        if stop is not None:
            request.finish_reason, request.stop_reason = stop
        stats = None
        if not request.prefilled:
            request.prefilled = True
            self._admission.prefilled(request)
            self._counters.prompt_tokens += request.num_prompt_tokens
            self._counters.cached_tokens += request.num_cached_tokens
            stats = request.prefill_stats(self._kv.block_size)
        collector.add(request, make_output(request, token, logprobs.of(line, request), stats))

    def _file_blocks(self, filled: dict[int, int]) -> None:
        """These rows have filled a block with their token of this number."""
        hasher = self._kv.hasher
        for request, block in self._batch.file_blocks(list(filled), list(filled.values())):
            if hasher is not None:
                request.add_block_hash(hasher, block)

    def _append_stale(
        self,
        record: InFlightStep,
        line: int,
        token: np.int32 | None,
        logprobs: SampledLogprobs,
        collector: OutputCollector,
    ) -> None:
        """Outcome for a request that was preempted while the step was with the workers; None: it sampled
        none.
        """
        request = record.requests[line]
        request.num_stale_tokens -= int(record.num_scheduled_tokens[line])
        assert request.num_stale_tokens >= 0, request
        if token is None or request.drop_stale_output:
            return
        request.output += token.tobytes()
        self._counters.generation_tokens += 1
        if self._metrics is not None:
            now = self._clock.monotonic()
            if request.prefilled:
                self._metrics.stale_token(request, now)
            else:
                self._metrics.first_token(request, now, self._clock.time())
        known = request.num_known_tokens
        window = request.params.repetition_detection
        tail = request.output_tokens()[-repetition_window(window) :].tolist() if window is not None else ()
        stop = check_stop(request, int(token), known, self._admission.limit(request), tail)
        self._emit(request, int(token), stop, line, logprobs, collector)
        if stop is not None:
            self._end(request, None)


def _identity(index: int) -> int:
    return index
