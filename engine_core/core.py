"""The engine without its process: scheduler, executor and the step loop. No threads, no sockets.

A test, a simulation or `EngineCoreProc` calls `step_fn` while `has_work`. With async scheduling that is
`step_with_batch_queue`: the next step is planned and sent before the answer to the one before is taken in, so
that the workers never wait for the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from engine_core.config import ConfigError, EngineConfig
from engine_core.outputs import StepOutputs
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.observed import SchedulerObserver, observed
from engine_core.scheduler.plug_in import scheduler_class
from engine_core.scheduler.scheduler import Scheduler
from executor.base import Completed, EngineCapacity, Executor, Future
from executor.step import EMPTY, ModelRunnerOutput, SchedulerOutput
from transport.clock import SYSTEM_CLOCK, Clock

BATCH_QUEUE_SIZE = 2  # steps in flight with async scheduling


class EngineCore:
    """All methods belong to one thread. Errors of the executor come out of the step methods."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock = SYSTEM_CLOCK,
        *,
        take_aborts: Callable[[], Iterable[str]] | None = None,
        track_finished: bool = False,
        make_observer: Callable[[EngineCapacity], SchedulerObserver] | None = None,
    ) -> None:
        """Starts the workers. Raises `ExecutorError`, or `ConfigError` if options do not suit the model.

        `take_aborts` is asked for ids to abort when a step's answer is there but not taken in yet: its
        tokens are not sent then. `track_finished` has the outputs name all ended requests, for a
        data-parallel coordinator. `make_observer` is called once the workers' capacity is known; what it
        returns hears of everything that the scheduler is told and decides.
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
        self.scheduler: Scheduler = scheduler_cls(
            config,
            self.capacity.num_gpu_blocks,
            self.capacity.max_model_len,
            clock,
            vocab_size=self.capacity.vocab_size,
            track_finished=track_finished,
        )
        self.batch_queue: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self.step_fn = self.step_with_batch_queue if config.async_scheduling else self.step
        self._take_aborts = take_aborts

    @property
    def has_work(self) -> bool:
        """Whether `step_fn` has something to do."""
        return bool(self.batch_queue) or self.scheduler.has_requests()

    def add_request(self, request: Request) -> None:
        """Raises `RequestError` if the request is refused."""
        self.scheduler.add_request(request)
        if request.abort_immediately:
            self.abort_requests([request.request_id])

    def abort_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests without an output. Unknown ids are passed over."""
        return self.scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def step(self) -> StepOutputs:
        """Plan a step, have it run, take in its outcome."""
        if not self.scheduler.has_requests():
            return {}
        step = self.scheduler.schedule()
        return self._take_in(step, self._submit(step))

    def step_with_batch_queue(self) -> StepOutputs:
        """Plan and send a step if there is one; unless the queue has room for another, take in the oldest."""
        queue = self.batch_queue
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            queue.append((step, self._submit(step)))
            if len(queue) < BATCH_QUEUE_SIZE and (len(step.slots) or self.scheduler.has_requests()):
                return {}
        if not queue:
            return {}
        return self._take_in(*queue.popleft())

    def _submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if len(step.slots) or len(step.finished_slots) or len(step.preempted_slots):
            return self.executor.execute_model(step, non_block=True)
        return Completed(ModelRunnerOutput(step.step_id, np.empty((0, 1), np.int32), EMPTY))

    def _take_in(self, step: SchedulerOutput, future: Future[ModelRunnerOutput]) -> StepOutputs:
        output = future.result()
        if self._take_aborts is not None:
            self.abort_requests(self._take_aborts())
        return self.scheduler.update_from_output(step, output)

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached KV, after a change of weights for example. See `Scheduler.reset_prefix_cache`."""
        return self.scheduler.reset_prefix_cache(reset_running)

    def shutdown(self) -> None:
        """Stop the workers. Idempotent."""
        self.executor.shutdown()
