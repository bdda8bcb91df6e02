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

import numpy as np

from engine_core.config import EngineConfig
from engine_core.counters import Counters
from engine_core.errors import RequestError
from engine_core.kv_cache.hashing import BlockHasher
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_events import KVEventRecorder
from engine_core.metrics import EngineMetrics
from engine_core.outputs import StepOutputs
from engine_core.protocol import EventType, FinishReason, SchedulerStats
from engine_core.request import Request, Status
from engine_core.scheduler.admission import Admission, Admitted
from engine_core.scheduler.history import (
    BLOCKS_RAN_OUT,
    CACHE_RESET,
    SEARCH,
    WORKERS_RESTARTED,
    History,
    Preemption,
)
from engine_core.scheduler.intake import Intake
from engine_core.scheduler.outcome import OutputCollector
from engine_core.scheduler.running import InFlightStep, RunningBatch
from engine_core.scheduler.running_phase import Grants, StepRules, grant_in_order, grant_together
from engine_core.scheduler.waiting import WaitingQueue, make_queue
from engine_core.validation import RequestLimits
from executor.step import EMPTY, Int32s, ModelRunnerOutput, SchedulerOutput
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
        metrics: EngineMetrics | None = None,
        kv_events: KVEventRecorder | None = None,
    ) -> None:
        """`num_gpu_blocks` counts the null block. `track_finished` reports the ids of all ended requests.
        `metrics` and `kv_events` hear of what happens.
        """
        self.config = config
        self.clock = clock
        self.hasher = (
            BlockHasher(config.block_size, config.prefix_caching_hash_algo)
            if config.enable_prefix_caching
            else None
        )
        self.counters = Counters()
        self.kv = KVCacheManager(
            num_gpu_blocks,
            config.block_size,
            self.hasher,
            config.watermark,
            counters=self.counters,
            events=kv_events,
        )
        self.limits = RequestLimits(
            max_model_len=max_model_len,
            max_kv_tokens=self.kv.max_tokens,
            vocab_size=vocab_size,
            max_loras=config.max_loras if config.enable_lora else 0,
        )
        self.budget = min(
            config.max_num_scheduled_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        self.log_stats = config.log_stats
        self.is_async = config.async_scheduling
        self.by_columns = True  # False: plan running requests one by one only

        self.requests: dict[str, Request] = {}  # all that live
        self.history = History()
        self.batch = RunningBatch(config.max_num_seqs, config.block_size)
        self.admission = Admission(
            config, self.make_queue(), max_model_len, self.batch, self.kv, clock, self.counters, metrics
        )
        self.waiting = self.admission.queue
        self.adapters = self.admission.adapters
        self.intake = Intake(
            self.batch, self.kv, self.admission, self.is_async, self._end, clock, self.counters, metrics
        )
        self._metrics = metrics
        self._kv_events = kv_events
        self.pause_state = PauseState.UNPAUSED

        self._step_id = 0
        self._finished_slots: list[int] = []  # to be announced with the next step
        self._preempted_slots: list[int] = []
        self._finished_ids: dict[int, list[str]] | None = {} if track_finished else None
        self._ended_unannounced = False  # a request ended since the last step, running or not

        # --prefill-schedule-interval
        self.num_executed_steps = 0  # those that ran something
        self._last_prefill_step = -config.prefill_schedule_interval
        self._capacity_bound = False  # the last step that admitted left admissible requests waiting

    def make_queue(self) -> WaitingQueue:
        """The waiting requests' queue, whose order is the policy; for subclasses to replace."""
        return make_queue(self.config.scheduling_policy)

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
        self.admission.add(request, len(self.requests))
        self.requests[request_id] = request
        self.counters.requests_admitted += 1
        self.adapters.queued(request)
        if self._metrics is not None:
            self._metrics.queued(request, self.clock.monotonic())

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
            self.admission.remove(request)
        request.status = Status.FINISHED
        self.kv.free(request)
        del self.requests[request.request_id]
        if not request.prefilled:
            self.admission.prefilled(request)
        self._ended_unannounced = True
        self.counters.requests_finished += 1
        self.history.ended(request, self.clock.monotonic())
        self.adapters.ended(request, slot is not None)
        if self._metrics is not None:
            self._metrics.ended(request, slot, self.clock.time())
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
            grants = grant_in_order(
                self.batch, self.kv, rules, lambda row, winner: self._preempt(row, BLOCKS_RAN_OUT, winner)
            )

        admitted = Admitted()
        if not grants.preempted and self.pause_state is not PauseState.PAUSED_ALL:
            is_paused = self.pause_state is PauseState.PAUSED_NEW
            if len(self.waiting) and (not is_paused or self.admission.interrupted):
                budget = rules.budget - grants.total
                admitted = self.admission.admit(rules, budget, only_interrupted=is_paused)
            if not rules.defer_prefills:
                self._capacity_bound = len(self.waiting) > len(self.admission.deferred)

        step = self._commit(grants, admitted)
        if len(step.slots):
            self.num_executed_steps += 1
        if grants.prefills or admitted.prefills:
            self._last_prefill_step = self.num_executed_steps
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
            and self.num_executed_steps + 1 - self._last_prefill_step < config.prefill_schedule_interval
            and not batch.columns().chunk.all()  # somebody decodes
        )
        return StepRules(
            budget=0 if self.pause_state is PauseState.PAUSED_ALL else self.budget,
            long_prefill_limit=limit,
            defer_prefills=defer,
            max_model_len=self.limits.max_model_len,
            priority=config.scheduling_policy == "priority",
        )

    def _preempt(self, row: int, why: str, winner: Request | None = None, drop_output: bool = False) -> None:
        """A running request gives up its blocks, to `winner`, and waits again; it is computed anew later.

        Tokens of it that are in flight are still delivered, unless `drop_output`.
        """
        request = self.batch.requests[row]
        stale = request.num_stale_tokens
        request.drop_stale_output = drop_output or (request.drop_stale_output and stale > 0)
        request.num_stale_tokens = stale + self.batch.num_in_flight(row)
        # What this very step was to compute of it will not be; vLLM leaves such blocks to be hit.
        self.kv.unname_blocks(request, self.batch.row(row).computed)
        self._preempted_slots.append(request.slot)
        self.counters.preemptions += 1
        self.adapters.preempted(request)
        if self._metrics is not None:
            self._metrics.preempted(request)
        self.batch.remove([row])
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        request.since_s = now = self.clock.monotonic()
        by = None if winner is None else winner.request_id
        self.history.preempted(request, Preemption(now, self._step_id, why, by))
        if self.log_stats:
            request.record_event(EventType.PREEMPTED, now)
        self.waiting.put_back(request)

    def _commit(self, grants: Grants, admitted: Admitted) -> SchedulerOutput:
        """Account for the step as if it were computed, and write it down."""
        batch = self.batch
        c = batch.columns()
        requests, counts, rows = batch.requests, grants.counts, grants.rows
        if admitted.counts:
            counts = np.concatenate((counts, np.array(admitted.counts, np.int32)))
            if rows is not None:
                first = len(requests) - len(admitted.counts)
                rows = np.concatenate((rows, np.arange(first, len(requests), dtype=np.int32)))
        which: slice | Int32s = slice(None) if rows is None else rows
        slots = c.slot[which].copy()
        before = c.computed[which].copy()
        after = before + counts
        target = c.known[which] + c.placeholders[which]
        samples = after >= target
        c.computed[which] = after
        c.chunk[which] = ~samples
        if self.is_async:
            c.placeholders[which] += samples
        in_step = requests[:] if rows is None else [requests[row] for row in rows.tolist()]
        batch.in_flight.append(InFlightStep(self._step_id, in_step, counts, samples, rows))

        step = SchedulerOutput(
            self._step_id,
            slots,
            counts,
            before,
            admitted.requests,
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
            self.intake.take_in(record, output, collector)
        finished = self._finished_ids
        if finished:
            self._finished_ids = {}
        collector.attach(self.make_stats() if self.log_stats else None, finished)
        if self._kv_events is not None:
            self._kv_events.flush()
        return collector.outputs

    # State.

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_deferred(self) -> int:
        """Of those that wait, the ones that wait for something other than capacity."""
        return len(self.admission.deferred)

    def num_unfinished(self) -> int:
        """Requests that could run in the present pause state."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        if self.pause_state is PauseState.PAUSED_NEW:
            return len(self.batch) + len(self.admission.interrupted)
        return len(self.batch) + len(self.waiting)

    def has_unfinished_requests(self) -> bool:
        return self.num_unfinished() > 0

    def has_requests(self) -> bool:
        """Whether `schedule` has something to do: requests, or the end of one to announce."""
        return self._ended_unannounced or self.has_unfinished_requests()

    @property
    def max_running(self) -> int:
        """Requests that may run at the same time."""
        return self.admission.max_running

    def set_limits(self, max_running: int, budget: int) -> None:
        """`budget`: tokens of a step. Neither may exceed what the configuration says. Requests that run
        already go on.
        """
        self.admission.max_running = max_running
        self.budget = budget

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def make_stats(self) -> SchedulerStats:
        """State now, and prefix cache counts since the last call."""
        deferred = self.num_deferred
        return SchedulerStats(
            num_running_reqs=len(self.batch),
            num_waiting_reqs=len(self.waiting) - deferred,
            kv_cache_usage=self.kv.pool.usage,
            prefix_cache_stats=self.kv.take_prefix_stats(),
            num_skipped_waiting_reqs=deferred,
            waiting_lora_adapters=dict(self.adapters.waiting),
            running_lora_adapters=dict(self.adapters.running),
        )

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached content. False, and nothing is done, while requests hold blocks.

        With `reset_running` they are preempted first, what is in flight of them is dropped, and they are
        computed anew.
        """
        if reset_running:
            self._preempt_all(CACHE_RESET)
        done = self.kv.reset_prefix_cache()
        if self._kv_events is not None:
            self._kv_events.flush()
        return done

    def restart(self) -> None:
        """The workers were replaced: no step is in flight, no KV is left. All requests are computed anew,
        in order; a pause does not keep those that ran from running again.

        Tokens that clients have seen stay as they are.
        """
        self.batch.in_flight.clear()
        self.admission.interrupted.update(self.batch.requests)
        for request in self.waiting:
            request.num_stale_tokens = 0
        self._preempt_all(WORKERS_RESTARTED)
        self.reset_prefix_cache()
        self._finished_slots.clear()  # the new workers know of nobody
        self._preempted_slots.clear()

    def _preempt_all(self, why: str) -> None:
        while len(self.batch):
            self._preempt(len(self.batch) - 1, why, drop_output=True)

    def allow_only(self, request_ids: Iterable[str] | None) -> None:
        """Nobody but these requests runs from now on, whatever else; None: everybody may."""
        allowed = self.admission.allowed = None if request_ids is None else frozenset(request_ids)
        if allowed is not None:
            for row in range(len(self.batch) - 1, -1, -1):
                if self.batch.requests[row].request_id not in allowed:
                    self._preempt(row, SEARCH)

    def known_tokens(self, request_ids: Iterable[str]) -> dict[str, int]:
        """How many tokens, prompt and output, those of these requests have that live."""
        live = {r.request_id: r for id_ in request_ids if (r := self.requests.get(id_)) is not None}
        known = {request_id: request.num_known_tokens for request_id, request in live.items()}
        for row, request in enumerate(self.batch.requests):
            if request.request_id in live:
                known[request.request_id] = self.batch.row(row).known
        return known

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
        if not self.admission.deferred <= waiting:
            problems.append("a deferred request does not wait")
        if not self.admission.interrupted <= waiting:
            problems.append("a request that the replacement of workers interrupted does not wait")
        queued = sum(request.num_prompt_tokens for request in live if not request.prefilled)
        if queued != self.admission.queued_tokens:
            problems.append(f"{queued} prompt tokens are queued, counted as {self.admission.queued_tokens}")
        return problems
