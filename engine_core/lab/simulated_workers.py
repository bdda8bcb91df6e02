"""Workers that take the time a latency model says, and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future as RestartFuture
from typing import Any

import numpy as np

from engine_core.lab.latency import LatencyModel, StepShape
from engine_core.lab.virtual_clock import VirtualClock
from executor.base import EngineCapacity, Executor, FailureCallback, Future
from executor.config import ExecutorConfig
from executor.step import ModelRunnerOutput, SchedulerOutput


class _Answer:
    """A step's outcome, there from a moment on. Who waits for it lets time pass until then."""

    def __init__(self, clock: VirtualClock, ready_s: float, output: ModelRunnerOutput) -> None:
        self._clock = clock
        self._ready_s = ready_s
        self._output = output

    def done(self) -> bool:
        return self._clock.monotonic() >= self._ready_s

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._clock.advance_to(self._ready_s)
        return self._output


class SimulatedWorkers(Executor):
    """Runs steps one after the other, as a rank group does, in the time of `clock`. Every token is 0."""

    def __init__(
        self, config: ExecutorConfig, capacity: EngineCapacity, latency: LatencyModel, clock: VirtualClock
    ) -> None:
        super().__init__(config)
        self.num_steps = 0
        self.busy_s = 0.0
        self._prefill_tokens = 0
        self._capacity = capacity
        self._latency = latency
        self._clock = clock
        self._free_s = 0.0  # when the last step sent is done
        self._known = np.zeros(config.max_num_seqs, np.int64)  # prompt and sampled tokens by slot

    def initialize(self) -> EngineCapacity:
        return self._capacity

    def _submit_step(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for request in step.new_requests:
            self._known[request.slot] = len(request.token_ids)
        slots = step.slots
        known = self._known[slots]
        samples = step.num_computed_tokens + step.num_scheduled_tokens == known
        self._known[slots] = known + samples

        shape = StepShape.of(step)
        self._prefill_tokens += shape.prefill_tokens
        duration_s = self._latency(shape)
        self._free_s = max(self._free_s, self._clock.monotonic()) + duration_s
        self.num_steps += 1
        self.busy_s += duration_s
        tokens = np.zeros((len(slots), 1), np.int32)
        output = ModelRunnerOutput(step.step_id, tokens, samples.astype(np.int32))
        return _Answer(self._clock, self._free_s, output)

    def restart(self, after_s: float = 0.0) -> RestartFuture[None]:
        raise NotImplementedError("simulated workers never fail")

    def take_prefill_tokens(self) -> int:
        """Prompt tokens sent to be computed since the last call."""
        count, self._prefill_tokens = self._prefill_tokens, 0
        return count

    def _submit_call(
        self,
        method: str,
        timeout_s: float,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reply_rank: int | None,
    ) -> Future[Any]:
        raise NotImplementedError(f"simulated workers have no method '{method}'")

    def await_all_ranks(self) -> None:
        """There are none."""

    def check_failed(self) -> None:
        """They never fail."""

    def set_failure_callback(self, callback: FailureCallback) -> None:
        """Never called."""

    def shutdown(self) -> None:
        """There is nothing to stop."""
