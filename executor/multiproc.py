"""Each rank in a process of its own, reached by one broadcast per call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from executor.base import Completed, EngineCapacity, Executor, FailureCallback, Future
from executor.call_codec import Call, encode_call
from executor.config import ExecutorConfig
from executor.control import OUTPUT_RANK
from executor.errors import ExecutorClosed, ExecutorError
from executor.futures import Answers, CallFuture, StepFuture
from executor.rank_group import RankGroup
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.step_codec import encode_step
from transport.clock import SYSTEM_CLOCK, Clock


class MultiprocExecutor(Executor):
    """Everything about the ranks that run is in `_group` and `_answers`."""

    def __init__(self, config: ExecutorConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(config)
        self._clock = clock
        self._group: RankGroup | None = None
        self._answers: Answers
        self._seq = 0
        self._callback_lock = threading.Lock()
        self._callback: FailureCallback | None = None
        self._failure: ExecutorError | None = None

    def initialize(self) -> EngineCapacity:
        self._group = RankGroup(self.config, self._on_failure, self._clock)
        self._answers = Answers(self._group, self._clock)
        return self._group.start()

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes, by rank."""
        return [process.pid for process in self._running().ranks]

    def _submit_step(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        seq = self._seq + 1
        parts = encode_step(seq, step)
        rows = len(step.slots)
        try:
            self._running().send(
                seq,
                parts,
                method="execute_model",
                step_id=step.step_id,
                num_rows=rows,
                limit_s=self.config.execute_timeout_s,
            )
        except ExecutorError as error:
            return Completed(error=error)
        self._seq = seq
        future = StepFuture(self._answers, seq, step.step_id, rows, OUTPUT_RANK)
        self._answers.expect(future)
        return future

    def _submit_call(
        self,
        method: str,
        timeout_s: float,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reply_rank: int | None,
    ) -> Future[Any]:
        seq = self._seq + 1
        parts = encode_call(Call(seq, method, args, kwargs, reply_rank))
        limit_s = max(timeout_s, self.config.execute_timeout_s)
        try:
            self._running().send(seq, parts, method=method, step_id=None, num_rows=None, limit_s=limit_s)
        except ExecutorError as error:
            return Completed(error=error)
        self._seq = seq
        world_size = self.config.tensor_parallel_size
        future = CallFuture(self._answers, seq, method, world_size, reply_rank, timeout_s)
        self._answers.expect(future)
        return future

    def _running(self) -> RankGroup:
        if self._group is None:
            raise ExecutorClosed
        return self._group

    def check_failed(self) -> None:
        if self._group is not None:
            self._group.check_failed()

    def set_failure_callback(self, callback: FailureCallback) -> None:
        with self._callback_lock:
            self._callback = callback
            failure = self._failure
        if failure is not None:
            callback(failure)

    def _on_failure(self, error: ExecutorError) -> None:
        with self._callback_lock:
            self._failure = error
            callback = self._callback
        if callback is not None:
            callback(error)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.stop(graceful=True)
