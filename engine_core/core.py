"""The engine without its process: scheduler, executor and the step loop. No threads, no sockets.

A test, a simulation or `EngineCoreProc` calls `step_fn` while `has_work`. With async scheduling that is
`step_with_batch_queue`: the next step is planned and sent before the answer to the one before is taken in, so
that the workers never wait for the scheduler.

When the workers fail they are restarted, within the limits of `recovery`, and all requests are computed anew
from their tokens. What was in flight is dropped: none of it was delivered, so no token is delivered twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future as RestartFuture

import numpy as np

from engine_core.config import ConfigError, EngineConfig
from engine_core.deadlines import Deadlines
from engine_core.kv_events import KVEventRecorder
from engine_core.metrics import EngineMetrics, Trace
from engine_core.outputs import StepOutputs, finish_outputs, merge
from engine_core.protocol import FinishReason, OutputError
from engine_core.recovery import Recovery, Restart, RestartImpossible
from engine_core.request import Request
from engine_core.scheduler.observed import SchedulerObserver, observed
from engine_core.scheduler.plug_in import scheduler_class
from engine_core.scheduler.running import InFlightStep
from engine_core.scheduler.scheduler import Scheduler
from engine_core.self_report import SelfReport
from engine_core.validation import DEADLINE_EXCEEDED
from executor.base import Completed, EngineCapacity, Executor, Future
from executor.errors import ExecutorError
from executor.step import EMPTY, ModelRunnerOutput, SchedulerOutput
from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_rows import EngineRow

logger = logging.getLogger("engine_core")

BATCH_QUEUE_SIZE = 2  # steps in flight with async scheduling
RECENT_STEPS = 64  # answered, and perhaps not done by all ranks: who was in them is remembered


class EngineCore:
    """All methods belong to one thread. An `ExecutorError` comes out of a method if there is no going on."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock = SYSTEM_CLOCK,
        *,
        take_aborts: Callable[[], Iterable[str]] | None = None,
        track_finished: bool = False,
        make_observer: Callable[[EngineCapacity], SchedulerObserver] | None = None,
        on_restarted: Callable[[], None] | None = None,
        row: EngineRow | None = None,
        kv_events: KVEventRecorder | None = None,
        collect_metrics: bool = False,
        trace: Trace | None = None,
    ) -> None:
        """Starts the workers. Raises `ExecutorError`, or `ConfigError` if options do not suit the model.

        `take_aborts` is asked for ids to abort when a step's answer is there but not taken in yet: its
        tokens are not sent then. `track_finished` has the outputs name all ended requests, for a
        data-parallel coordinator. `make_observer` is called once the workers' capacity is known; what it
        returns hears of everything that the scheduler is told and decides. `on_restarted` is called from any
        thread when workers have been restarted, or could not be: `step_fn` does not have to wait any more.
        `row` is where to say what the engine does; `kv_events` hears of the prefix cache; `collect_metrics`
        is for `metrics`, which is None otherwise, unless requests are to be traced (`EngineMetrics`).
        """
        scheduler_cls = scheduler_class(config)
        self.config = config
        self.executor = executor
        self.capacity = executor.initialize()
        try:
            config.validate(self.capacity.max_model_len)
        except ConfigError:
            executor.shutdown()
            raise
        if make_observer is not None:
            scheduler_cls = observed(scheduler_cls, make_observer(self.capacity))
        self.metrics: EngineMetrics | None = None
        if collect_metrics or trace is not None:
            self.metrics = EngineMetrics(config.max_num_seqs, self.capacity.max_model_len, trace)
        self.scheduler: Scheduler = scheduler_cls(
            config,
            self.capacity.num_gpu_blocks,
            self.capacity.max_model_len,
            clock,
            vocab_size=self.capacity.vocab_size,
            track_finished=track_finished,
            metrics=self.metrics,
            kv_events=kv_events,
        )
        self.row = row
        self.report: SelfReport | None = None
        if row is not None or self.metrics is not None:
            self.report = SelfReport(self.scheduler, row, self.metrics, clock)
        self.batch_queue: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self.step_fn = self.step_with_batch_queue if config.async_scheduling else self.step
        self._take_aborts = take_aborts
        self._deadlines = Deadlines()
        restarts = config.max_worker_restarts if config.on_worker_failure == "restart" else 0
        self.recovery = Recovery(restarts, config.restart_window_s, clock)
        self.num_restarts = 0
        self._on_restarted = on_restarted
        self._restart: RestartFuture[None] | None = None  # the workers are being restarted
        self._recent_steps: deque[InFlightStep] = deque(maxlen=RECENT_STEPS)
        self._num_tokens_made = 0
        self._clock = clock

    @property
    def has_work(self) -> bool:
        """Whether `step_fn` has something to do."""
        return bool(self.batch_queue) or self._restart is not None or self.scheduler.has_requests()

    @property
    def is_restarting(self) -> bool:
        """Whether `step_fn` would wait for workers to come up."""
        return self._restart is not None and not self._restart.done()

    def add_request(self, request: Request) -> None:
        """Raises `RequestError` if the request is refused."""
        self.scheduler.add_request(request)
        if request.deadline_s is not None:
            self._deadlines.add(request, self._clock.monotonic() + request.deadline_s)
        if request.abort_immediately:
            self.abort_requests([request.request_id])

    @property
    def next_deadline_s(self) -> float | None:
        """When `end_overdue` has something to do, in monotonic seconds."""
        return self._deadlines.next_s()

    def end_overdue(self) -> StepOutputs:
        """End the requests whose time is up; returns their last outputs."""
        outputs: StepOutputs = {}
        overdue = self._deadlines.take_overdue(self._clock.monotonic())
        if overdue:
            self.scheduler.finish_requests([request.request_id for request in overdue], FinishReason.ERROR)
        for request in overdue:
            count = len(request.output_tokens())
            message = f"not done within deadline_s = {request.deadline_s:g}: it had {count} tokens of output"
            error = OutputError(DEADLINE_EXCEEDED, message, True)  # another engine may have the time
            for client_index, ended in finish_outputs([request], error).items():
                merge(outputs, client_index, ended)
        return outputs

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests without an output. Unknown ids are passed over."""
        return self.scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def step(self) -> StepOutputs:
        """Plan a step, have it run, take in its outcome."""
        return self._survive(self._step)

    def step_with_batch_queue(self) -> StepOutputs:
        """Plan and send a step if there is one; unless the queue has room for another, take in the oldest."""
        return self._survive(self._step_with_batch_queue)

    def check_workers(self) -> StepOutputs:
        """Go on after a failure that was noticed while no step waited for it."""
        if self._restart is None:
            try:
                self.executor.check_failed()
            except ExecutorError as error:
                return self._recover(error)
        return {}

    def _step(self) -> StepOutputs:
        if not self.scheduler.has_requests():
            return {}
        step, future = self._plan_and_submit()
        return self._take_in(step, future)

    def _step_with_batch_queue(self) -> StepOutputs:
        queue = self.batch_queue
        if self.scheduler.has_requests():
            queue.append(self._plan_and_submit())
            step = queue[-1][0]
            if len(queue) < BATCH_QUEUE_SIZE and (len(step.slots) or self.scheduler.has_requests()):
                return {}
        if not queue:
            return {}
        return self._take_in(*queue.popleft())

    def _plan_and_submit(self) -> tuple[SchedulerOutput, Future[ModelRunnerOutput]]:
        report = self.report
        if report is None:
            step = self.scheduler.schedule()
            return step, self._submit(step)
        now = report.now
        begun_s = now()
        step = self.scheduler.schedule()
        planned_s = now()
        future = self._submit(step)
        report.sent(step.step_id, begun_s, planned_s, now())
        return step, future

    def _submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if len(step.slots) or len(step.finished_slots) or len(step.preempted_slots):
            return self.executor.execute_model(step, non_block=True)
        return Completed(ModelRunnerOutput(step.step_id, np.empty((0, 1), np.int32), EMPTY))

    def _take_in(self, step: SchedulerOutput, future: Future[ModelRunnerOutput]) -> StepOutputs:
        report = self.report
        if report is not None:
            report.waiting()
        output = future.result()
        if self.recovery.is_watching:
            # One rank answers for all, and may be ahead of one that fails at this step.
            self.executor.await_all_ranks()
        answered_s = report.now() if report is not None else 0.0
        if self._take_aborts is not None:
            self.abort_requests(self._take_aborts())
        self._recent_steps.extend(self.scheduler.batch.in_flight[:1])
        outputs = self.scheduler.update_from_output(step, output)
        if report is not None:
            report.taken_in(answered_s)
        for client in outputs.values():
            self._num_tokens_made += len(client.requests) + len(client.outputs)
        return outputs

    # Failures of the workers

    def _survive(self, step: Callable[[], StepOutputs]) -> StepOutputs:
        if self._restart is not None and not self._finish_restart(self._restart):
            return {}
        try:
            outputs = step()
        except ExecutorError as error:
            return self._recover(error)
        if self.recovery.is_watching:
            self._observe()
        return outputs

    def _recover(self, cause: ExecutorError) -> StepOutputs:
        """Begin a restart. Returns the last output of a request that is to blame. Raises the cause if this is
        the end.
        """
        lost_call = self.executor.lost_call
        if self.recovery.max_restarts == 0:
            raise cause
        if lost_call is not None:
            raise RestartImpossible(cause, lost_call)
        suspects = self._suspects(cause)
        decision = self.recovery.failed(cause, suspects, self._num_tokens_made)
        self.batch_queue.clear()
        self._recent_steps.clear()
        self.scheduler.restart()
        outputs: StepOutputs = {}
        if decision.convicted is not None:
            convicted = self.scheduler.finish_requests([decision.convicted], FinishReason.ERROR)
            outputs = finish_outputs(convicted, OutputError("worker_error", str(cause), False))
        self.scheduler.allow_only(self.recovery.allowed)
        if self.report is not None:
            self.report.first_error(str(cause))
            self.report.restarting_workers()
        logger.error("%s\nrestarting the ranks: %s", cause.report(), self._outlook(decision))
        self._begin_restart(decision)
        return outputs

    def _suspects(self, cause: ExecutorError) -> dict[str, int]:
        """The live requests of the step that failed, with the tokens that they know."""
        step_id = getattr(cause, "step_id", None)
        for step in (*self.scheduler.batch.in_flight, *self._recent_steps):
            if step.step_id == step_id:
                known = self.scheduler.known_tokens(request.request_id for request in step.requests)
                return {r.request_id: known[r.request_id] for r in step.requests if r.request_id in known}
        return {}

    def _outlook(self, decision: Restart) -> str:
        words = [f"{len(self.scheduler.requests)} requests will be computed anew"]
        if decision.convicted is not None:
            words.append(f"request {decision.convicted} is to blame and ends with an error")
        allowed = self.recovery.allowed
        if allowed is not None:
            words.append(f"{len(allowed)} of them first, to find the one that is to blame")
        return "; ".join(words)

    def _begin_restart(self, decision: Restart) -> None:
        self._restart_began_s = self._clock.monotonic()
        self._restart = self.executor.restart(decision.after_s)
        if self._on_restarted is not None:
            on_restarted = self._on_restarted
            self._restart.add_done_callback(lambda _: on_restarted())

    def _finish_restart(self, restart: RestartFuture[None]) -> bool:
        """Wait for the workers; whether they are up. If not, another attempt is on its way."""
        try:
            restart.result()  # no deadline: each phase of a start has its own
        except ExecutorError as error:
            decision = self.recovery.start_failed(error)
            logger.error("%s\nthe ranks did not come up; trying again", error.report())
            self._begin_restart(decision)
            return False
        self._restart = None
        self.num_restarts += 1
        self.recovery.restarted()
        if self.report is not None:
            self.report.workers_restarted(self.num_restarts)
        took_s = self._clock.monotonic() - self._restart_began_s
        logger.warning("the ranks are up again after %.2f s", took_s)
        return True

    def restart_workers(self) -> None:
        """Replace the workers on order. All requests are computed anew. Raises RuntimeError if that is being
        done.
        """
        if self._restart is not None:
            raise RuntimeError("the workers are being restarted already")
        self.batch_queue.clear()
        self.scheduler.restart()
        if self.report is not None:
            self.report.restarting_workers()
        self._begin_restart(Restart())

    def _observe(self) -> None:
        """Tell who of those under suspicion got on."""
        if self.recovery.observe(self.scheduler.known_tokens(self.recovery.observed)):
            self.scheduler.allow_only(self.recovery.allowed)

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached KV, after a change of weights for example. See `Scheduler.reset_prefix_cache`."""
        return self.scheduler.reset_prefix_cache(reset_running)

    def shutdown(self) -> None:
        """Stop the workers. Idempotent."""
        self.executor.shutdown()
