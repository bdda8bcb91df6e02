"""Decides every step: who runs, for how many tokens, in which blocks.

Given the same configuration, arrivals, aborts and sampled tokens, the decisions are those of vLLM 0.33's
scheduler; `docs/scheduling.md` tells the rules and `docs/parity.md` the differences.

A step has two halves. `schedule` plans it; `update_from_output` takes in what the workers sampled. With
async scheduling the next step is planned while one is with the workers: a token in flight counts as a
*placeholder*.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import compress

import numpy as np

from engine_core.config import EngineConfig
from engine_core.errors import RequestError
from engine_core.kv_cache.hashing import BlockHasher
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.outputs import StepOutputs
from engine_core.protocol import EngineCoreOutput, EventType, FinishReason, LogprobsLists, SchedulerStats
from engine_core.request import Request, Status
from engine_core.scheduler.outcome import (
    OutputCollector,
    SampledLogprobs,
    keep_prompt_logprobs,
    make_output,
)
from engine_core.scheduler.running import ALWAYS, CARE, CHECK, KNOWN, LIMIT, ONCE, InFlightStep, RunningBatch
from engine_core.scheduler.running_phase import (
    Grants,
    StepRules,
    grant_in_order,
    grant_together,
    name_blocks,
    next_name,
)
from engine_core.scheduler.stopping import Stop, check_stop, repetition_window
from engine_core.scheduler.waiting import make_queue
from engine_core.validation import RequestLimits
from executor.step import EMPTY, Int32s, ModelRunnerOutput, NewRequest, SchedulerOutput
from transport.clock import SYSTEM_CLOCK, Clock


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1  # running requests go on, waiting ones stay
    PAUSED_ALL = 2  # nobody runs


class Scheduler:
    """Not thread-safe; `limits` and `hasher` may be used from other threads."""

    def __init__(
        self,
        config: EngineConfig,
        num_gpu_blocks: int,
        max_model_len: int,
        clock: Clock = SYSTEM_CLOCK,
        *,
        vocab_size: int | None = None,
        track_finished: bool = False,
    ) -> None:
        """`num_gpu_blocks` counts the null block. `track_finished` reports the ids of all ended requests."""
        self.config = config
        self.clock = clock
        self.hasher = (
            BlockHasher(config.block_size, config.prefix_caching_hash_algo)
            if config.enable_prefix_caching
            else None
        )
        self.kv = KVCacheManager(num_gpu_blocks, config.block_size, self.hasher, config.watermark)
        self.limits = RequestLimits(
            max_model_len=max_model_len,
            max_kv_tokens=self.kv.max_tokens,
            vocab_size=vocab_size,
            max_loras=config.max_loras if config.enable_lora else 0,
        )
        self.max_active = config.max_num_active_seqs or config.max_num_seqs
        self.budget = min(
            config.max_num_scheduled_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        self.log_stats = config.log_stats
        self.is_async = config.async_scheduling
        self.by_columns = True  # False: plan running requests one by one only

        self.requests: dict[str, Request] = {}  # all that live
        self.waiting = make_queue(config.scheduling_policy)
        self.batch = RunningBatch(config.max_num_seqs, config.block_size)
        self.deferred: set[Request] = set()  # waiting requests that the last scans passed over
        self.pause_state = PauseState.UNPAUSED

        self._step_id = 0
        self._finished_slots: list[int] = []  # to be announced with the next step
        self._preempted_slots: list[int] = []
        self._finished_ids: dict[int, list[str]] | None = {} if track_finished else None
        self._ended_unannounced = False  # a request ended since the last step, running or not
        self._queued_tokens = 0  # prompt tokens of requests without output

        # --prefill-schedule-interval
        self._executed_steps = 0
        self._last_prefill_step = -config.prefill_schedule_interval
        self._capacity_bound = False  # the last step that admitted left admissible requests waiting

    # Arrival and end.

    def add_request(self, request: Request) -> None:
        """Let a request wait its turn.

        Raises `RequestError`: "duplicate_request_id" if a live request has its id, "queue_full" (retryable)
        beyond --max-num-queued-reqs or --max-num-queued-tokens.
        """
        request_id = request.request_id
        if request_id in self.requests:
            raise RequestError(
                "duplicate_request_id", f"a request with id {request_id!r} is live", request_id=request_id
            )
        most = self.config.max_num_queued_reqs
        if most is not None and len(self.requests) >= most:
            raise RequestError(
                "queue_full",
                f"the engine holds {len(self.requests)} requests of at most {most}; try again later",
                retryable=True,
                request_id=request_id,
            )
        most = self.config.max_num_queued_tokens
        if most is not None and self._queued_tokens >= most:
            raise RequestError(
                "queue_full",
                f"{self._queued_tokens} prompt tokens are queued, the limit is {most}; try again later",
                retryable=True,
                request_id=request_id,
            )
        self.requests[request_id] = request
        self.waiting.add(request)
        self._queued_tokens += request.num_prompt_tokens
        if self.log_stats:
            request.record_event(EventType.QUEUED, self.clock.monotonic())

    def finish_requests(self, request_ids: Iterable[str] | None, reason: FinishReason) -> list[Request]:
        """End requests from outside; None ends all. Unknown ids are passed over.

        Blocks are free at once, also of requests with a step in flight: what that step samples is dropped.
        Returns the requests that ended; no output is made for them.
        """
        if request_ids is None:
            ended = list(self.requests.values())
        else:
            ended = [self.requests[id_] for id_ in dict.fromkeys(request_ids) if id_ in self.requests]
        running = [request for request in ended if request.status is Status.RUNNING]
        slots = {request: request.slot for request in running}
        if running:
            self._leave_batch(running)
        for request in ended:
            request.finish_reason = reason
            self._end(request, slots.get(request))
        return ended

    def _leave_batch(self, requests: list[Request]) -> None:
        if len(requests) == 1:
            rows = [self.batch.requests.index(requests[0])]
        else:
            leaving = set(requests)
            rows = [row for row, request in enumerate(self.batch.requests) if request in leaving]
        self.batch.remove(rows)

    def _end(self, request: Request, slot: int | None) -> None:
        """A request whose `finish_reason` is set ends; `slot` is what it had in the batch, which it left."""
        if slot is not None:
            self._finished_slots.append(slot)
        elif request.status is not Status.RUNNING:
            self.waiting.remove(request)
            self.deferred.discard(request)
        request.status = Status.FINISHED
        self.kv.free(request)
        del self.requests[request.request_id]
        if not request.prefilled:
            self._queued_tokens -= request.num_prompt_tokens
        self._ended_unannounced = True
        if self._finished_ids is not None:
            self._finished_ids.setdefault(request.client_index, []).append(request.request_id)

    # Planning a step.

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. It counts as in flight until `update_from_output` is given its answer.

        A step may have no rows: when nobody can run, or only to announce slots that were left.
        """
        self._step_id += 1
        rules = self._rules()
        grants = None
        if self.by_columns:
            grants = grant_together(self.batch, self.kv, rules)
        if grants is None:
            now = self.clock.monotonic()
            grants = grant_in_order(self.batch, self.kv, rules, lambda row: self._preempt(row, now))

        num_ran = len(self.batch)
        new_requests: list[NewRequest] = []
        new_counts: list[int] = []
        prefills = grants.prefills
        if not grants.preempted and self.pause_state is not PauseState.PAUSED_ALL:
            prefills |= self._admit(rules, rules.budget - int(grants.counts.sum()), new_requests, new_counts)
            if not rules.defer_prefills:
                self._capacity_bound = len(self.waiting) > len(self.deferred)

        step = self._commit(grants, num_ran, new_requests, new_counts)
        if len(step.slots):
            self._executed_steps += 1
        if prefills:
            self._last_prefill_step = self._executed_steps
        return step

    def _rules(self) -> StepRules:
        config, batch = self.config, self.batch
        limit = config.long_prefill_token_threshold
        if limit:
            eligible = len(batch) + len(self.waiting)
            if eligible <= 1:
                limit = 0  # nobody to starve
            elif config.long_prefill_token_threshold_adaptive:
                limit = max(limit, config.max_num_batched_tokens // eligible)
        defer = (
            config.prefill_schedule_interval > 1
            and not self._capacity_bound
            and self._executed_steps + 1 - self._last_prefill_step < config.prefill_schedule_interval
            and not batch.columns().chunk.all()  # somebody decodes
        )
        return StepRules(
            budget=0 if self.pause_state is PauseState.PAUSED_ALL else self.budget,
            long_prefill_limit=limit,
            defer_prefills=defer,
            max_model_len=self.limits.max_model_len,
            priority=config.scheduling_policy == "priority",
        )

    def _admit(
        self, rules: StepRules, budget: int, new_requests: list[NewRequest], new_counts: list[int]
    ) -> bool:
        """Let waiting requests run while budget, seats and blocks last. True if one has a prompt to
        compute.
        """
        waiting, batch, kv = self.waiting, self.batch, self.kv
        passed_over: list[Request] = []
        prefills = False
        if self.pause_state is not PauseState.UNPAUSED:
            return False
        now = self.clock.monotonic() if self.log_stats else 0.0
        loras = (
            {r.lora.int_id for r in batch.requests if r.lora is not None} if self.limits.max_loras else set()
        )
        while budget > 0 and len(waiting) and len(batch) < self.max_active:
            request = waiting.peek()
            lora = request.lora
            if (request.num_stale_tokens and not request.drop_stale_output) or (
                lora is not None and lora.int_id not in loras and len(loras) >= self.limits.max_loras
            ):
                passed_over.append(waiting.pop())
                self.deferred.add(request)
                continue

            known = request.num_known_tokens
            hits = kv.find_prefix(request, known)
            computed = len(hits) * kv.block_size
            if not request.num_preemptions:
                request.num_cached_tokens = computed
            if rules.defer_prefills and computed < known - 1:
                break
            count = known - computed
            if rules.long_prefill_limit:
                count = min(count, rules.long_prefill_limit)
            if count > budget:
                if not self.config.enable_chunked_prefill:
                    break
                count = budget
            if not kv.admit(
                request,
                hits,
                computed + count,
                known,
                reserve_all=self.config.scheduler_reserve_full_isl,
                keep_watermark=bool(batch.requests),
            ):
                break
            kv.record_lookup(request, known, len(hits))

            waiting.pop()
            self.deferred.discard(request)
            if self.log_stats:
                request.record_event(EventType.SCHEDULED, now)
            self._enter_batch(request, computed, count)
            new_requests.append(
                NewRequest(
                    slot=request.slot,
                    request_id=request.request_id,
                    token_ids=request.known_tokens(),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=computed,
                    block_ids=np.array(request.block_ids, np.int32),
                    params=request.params,
                    lora=lora,
                )
            )
            new_counts.append(count)
            budget -= count
            prefills |= computed < known - 1
            if lora is not None:
                loras.add(lora.int_id)
        for request in reversed(passed_over):
            waiting.put_back(request)
        return prefills

    def _enter_batch(self, request: Request, computed: int, count: int) -> None:
        self.kv.name_blocks(request, computed + count)
        request.status = Status.RUNNING
        request.prompt_logprobs = None
        params = request.params
        care = 0
        if not request.prefilled or request.events:
            care |= ONCE
        if params.logprobs is not None:
            care |= ALWAYS
        if request.stop_token_ids or params.repetition_detection is not None:
            care |= CHECK
        self.batch.add(request, computed, self._limit(request), next_name(request, self.kv), care)

    def _limit(self, request: Request) -> int:
        """Known tokens at which the length ends a request."""
        return min(
            self.limits.max_model_len,
            request.num_prompt_tokens + request.max_tokens,
            self.limits.max_kv_tokens + 1,  # the last token needs no KV
        )

    def _preempt(self, row: int, now: float, drop_output: bool = False) -> None:
        """A running request gives up its blocks and waits again; it is computed anew later.

        Tokens of it that are in flight are still delivered, unless `drop_output`.
        """
        request = self.batch.requests[row]
        stale = request.num_stale_tokens
        request.drop_stale_output = drop_output or (request.drop_stale_output and stale > 0)
        request.num_stale_tokens = stale + self.batch.num_in_flight(row)
        self._preempted_slots.append(request.slot)
        self.batch.remove([row])
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EventType.PREEMPTED, now)
        self.waiting.put_back(request)

    def _commit(
        self, grants: Grants, num_ran: int, new_requests: list[NewRequest], new_counts: list[int]
    ) -> SchedulerOutput:
        """Account for the step as if it were computed, and write it down."""
        batch = self.batch
        c = batch.columns()
        counts, rows = grants.counts, grants.rows
        requests = batch.requests
        if new_counts:
            counts = np.concatenate((counts, np.array(new_counts, np.int32)))
            if rows is not None:
                rows = np.concatenate((rows, np.arange(num_ran, len(requests), dtype=np.int32)))
        which: slice | Int32s = slice(None) if rows is None else rows
        slots = c.slot[which].copy()
        before = c.computed[which].copy()
        after = before + counts
        target = c.known[which] + c.placeholders[which]
        chunk = after < target
        c.computed[which] = after
        c.chunk[which] = chunk
        if self.is_async:
            c.placeholders[which] += ~chunk
        in_step = requests[:] if rows is None else [requests[row] for row in rows.tolist()]
        batch.in_flight.append(InFlightStep(self._step_id, in_step, counts, rows))

        step = SchedulerOutput(
            self._step_id,
            slots,
            counts,
            before,
            new_requests,
            np.array(grants.block_slots, np.int32) if grants.block_slots else EMPTY,
            np.array(grants.block_ids, np.int32) if grants.block_ids else EMPTY,
            np.array(self._finished_slots, np.int32) if self._finished_slots else EMPTY,
            np.array(self._preempted_slots, np.int32) if self._preempted_slots else EMPTY,
        )
        self._finished_slots.clear()
        self._preempted_slots.clear()
        self._ended_unannounced = False
        return step

    # Taking in a step's outcome.

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> StepOutputs:
        """Take in what the workers sampled for the oldest step in flight.

        Raises RuntimeError if `step` or `output` is not of that step.
        """
        in_flight = self.batch.in_flight
        if not in_flight or not in_flight[0].step_id == step.step_id == output.step_id:
            expected = in_flight[0].step_id if in_flight else None
            raise RuntimeError(
                f"expected the outcome of step {expected}, got step {step.step_id}, output {output.step_id}"
            )
        record = in_flight.pop(0)
        collector = OutputCollector()
        if record.requests:
            self._take_in(record, output, collector)
        finished = self._finished_ids
        if finished:
            self._finished_ids = {}
        collector.attach(self.make_stats() if self.log_stats else None, finished)
        return collector.outputs

    def _take_in(self, record: InFlightStep, output: ModelRunnerOutput, collector: OutputCollector) -> None:
        tokens = output.sampled_token_ids[:, 0].astype(np.int32)  # a copy: the message's memory is not ours
        sampled = output.num_sampled != 0
        logprobs = SampledLogprobs(output.logprobs)
        requests, rows = record.requests, record.rows
        for part in output.prompt_logprobs:
            if rows is None or rows[part.row] >= 0 or not requests[part.row].drop_stale_output:
                keep_prompt_logprobs(requests[part.row], part)
        if rows is None and np.count_nonzero(sampled) == len(sampled):
            self._append(requests, slice(0, len(tokens)), None, tokens, logprobs, collector)
            return
        if rows is None:
            rows = record.row_list()
        for line in np.flatnonzero(rows < 0).tolist():
            request = requests[line]
            if request.status is not Status.FINISHED:
                count = int(record.num_scheduled_tokens[line])
                self._take_in_stale(
                    request, count, line, tokens[line] if sampled[line] else None, logprobs, collector
                )
        lines = np.flatnonzero((rows >= 0) & sampled)
        if len(lines):
            line_list: list[int] = lines.tolist()
            self._append(
                [requests[line] for line in line_list],
                rows[lines],
                line_list,
                tokens[lines],
                logprobs,
                collector,
            )

    def _append(
        self,
        requests: list[Request],
        rows: slice | Int32s,
        lines: list[int] | None,
        tokens: Int32s,
        logprobs: SampledLogprobs,
        collector: OutputCollector,
    ) -> None:
        """One token for each of these running requests; `lines` are their rows in the step, None: 0, 1, 2,
        ...
        """
        batch, kv = self.batch, self.kv
        c = batch.columns()
        row_of = (lambda i: i) if isinstance(rows, slice) else rows.tolist().__getitem__
        known = c.known[rows] + 1
        position = (known - 1) % batch.block_size
        batch.tail[c.slot[rows], position] = tokens
        c.known[rows] = known
        if self.is_async:
            c.placeholders[rows] -= 1
            # What this step computed is certain now, also if the request is in no later step.
            for i in np.flatnonzero(known > c.next_name[rows]).tolist():
                name_blocks(batch, kv, row_of(i), int(known[i]) - 1)

        rare = (tokens == c.eos[rows]) | (known >= c.limit[rows]) | (c.care[rows] != 0)
        leaving: list[int] = []
        rare_indices = np.flatnonzero(rare).tolist()
        if rare_indices:
            plain = ~rare
            collector.add_plain(
                list(compress(requests, plain.tolist())),
                tokens[plain],
                c.client[rows][plain],
                list(batch.clients),
            )
            for i in rare_indices:
                row = row_of(i)
                if self._rare_output(
                    row, int(tokens[i]), i if lines is None else lines[i], logprobs, collector
                ):
                    leaving.append(row)
        else:
            collector.add_plain(requests, tokens, c.client[rows], list(batch.clients))

        for i in np.flatnonzero(position == batch.block_size - 1).tolist():
            row = row_of(i)
            if row not in leaving:
                self._file_block(row, int(known[i]))
        if leaving:
            gone = [(batch.requests[row], batch.requests[row].slot) for row in leaving]
            batch.remove(leaving)
            for request, slot in gone:
                self._end(request, slot)

    def _rare_output(
        self, row: int, token: int, line: int, logprobs: SampledLogprobs, collector: OutputCollector
    ) -> bool:
        """Output of a row that ends, or whose output is more than a token. True if it ends."""
        request = self.batch.requests[row]
        table = self.batch.table
        window = request.params.repetition_detection
        tail = self.batch.output_tail(row, repetition_window(window)) if window is not None else ()
        stop = check_stop(request, token, int(table[KNOWN, row]), int(table[LIMIT, row]), tail)
        care = int(table[CARE, row])
        table[CARE, row] = care & ~ONCE
        if stop is None and not care & (ONCE | ALWAYS):
            outputs = collector.client(request.client_index)
            outputs.outputs.append(EngineCoreOutput(request.request_id, [token]))
            return False
        self._emit(request, token, stop, logprobs.of(line, request), collector)
        return stop is not None

    def _emit(
        self,
        request: Request,
        token: int,
        stop: Stop | None,
        logprobs: LogprobsLists | None,
        collector: OutputCollector,
    ) -> None:
        if stop is not None:
            request.finish_reason, request.stop_reason = stop
        stats = None
        if not request.prefilled:
            request.prefilled = True
            self._queued_tokens -= request.num_prompt_tokens
            stats = request.prefill_stats(self.kv.block_size)
        collector.add(request, make_output(request, token, logprobs, stats))

    def _file_block(self, row: int, known: int) -> None:
        """The row's token number `known` filled a block."""
        block = self.batch.full_block(row, known)
        if self.hasher is not None:
            request = self.batch.requests[row]
            hashes = request.block_hashes
            parent = hashes[-1] if hashes else self.hasher.root(request.cache_salt, request.lora)
            hashes.append(self.hasher.one(parent, block))

    def _take_in_stale(
        self,
        request: Request,
        count: int,
        line: int,
        token: np.int32 | None,
        logprobs: SampledLogprobs,
        collector: OutputCollector,
    ) -> None:
        """A step's outcome for a request that was preempted while the step was with the workers."""
        request.num_stale_tokens -= count
        assert request.num_stale_tokens >= 0, request
        if token is None or request.drop_stale_output:
            return
        request.output += token.tobytes()
        known = request.num_known_tokens
        window = request.params.repetition_detection
        tail = request.output_tokens()[-repetition_window(window) :].tolist() if window is not None else ()
        stop = check_stop(request, int(token), known, self._limit(request), tail)
        self._emit(request, int(token), stop, logprobs.of(line, request), collector)
        if stop is not None:
            self._end(request, None)

    # State.

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def num_unfinished(self) -> int:
        """Requests that could run in the present pause state."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        if self.pause_state is PauseState.PAUSED_NEW:
            return len(self.batch)
        return len(self.batch) + len(self.waiting)

    def has_unfinished_requests(self) -> bool:
        return self.num_unfinished() > 0

    def has_requests(self) -> bool:
        """Whether `schedule` has something to do: requests, or the end of one to announce."""
        return self._ended_unannounced or self.has_unfinished_requests()

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def make_stats(self) -> SchedulerStats:
        """State now, and prefix cache counts since the last call."""
        deferred = len(self.deferred)
        return SchedulerStats(
            num_running_reqs=len(self.batch),
            num_waiting_reqs=len(self.waiting) - deferred,
            kv_cache_usage=self.kv.pool.usage,
            prefix_cache_stats=self.kv.take_prefix_stats(),
            num_skipped_waiting_reqs=deferred,
        )

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached content. False, and nothing is done, while requests hold blocks.

        With `reset_running` they are preempted first, what is in flight of them is dropped, and they are
        computed anew.
        """
        if reset_running:
            now = self.clock.monotonic()
            while len(self.batch):
                self._preempt(len(self.batch) - 1, now, drop_output=True)
        return self.kv.reset_prefix_cache()

    def restart(self) -> None:
        """The workers were replaced: no step is in flight, no KV is left. All requests are computed anew,
        in order.

        Tokens that clients have seen stay as they are.
        """
        self.batch.in_flight.clear()
        for request in self.waiting:
            request.num_stale_tokens = 0
        self.reset_prefix_cache(reset_running=True)
        self._finished_slots.clear()  # the new workers know of nobody
        self._preempted_slots.clear()

    def check(self) -> list[str]:
        """What is wrong with the accounts, a sentence each; empty if nothing is. Linear in blocks and
        requests.
        """
        live = self.requests.values()
        problems = self.kv.pool.check((r.request_id, r.block_ids, r.num_named_blocks) for r in live)
        problems += self.batch.check()
        running, waiting = set(self.batch.requests), set(self.waiting)
        if running & waiting or running | waiting != set(live):
            problems.append("live requests are not the running and the waiting ones")
        for request in live:
            if (request.status is Status.RUNNING) != (request in running):
                problems.append(f"request {request.request_id} has status {request.status.name}")
            if request not in running and request.block_ids:
                problems.append(f"waiting request {request.request_id} holds {len(request.block_ids)} blocks")
        if not self.deferred <= waiting:
            problems.append("a deferred request does not wait")
        queued = sum(request.num_prompt_tokens for request in live if not request.prefilled)
        if queued != self._queued_tokens:
            problems.append(f"{queued} prompt tokens are queued, counted as {self._queued_tokens}")
        return problems
