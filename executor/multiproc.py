"""Each rank in a process of its own, reached by one broadcast per call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from concurrent.futures import Future as RestartFuture
from typing import Any

from executor.base import Completed, EngineCapacity, Executor, FailureCallback, Future
from executor.call_codec import Call, encode_call
from executor.config import ExecutorConfig
from executor.control import OUTPUT_RANK
from executor.errors import (
    ExecutorClosed,
    ExecutorError,
    ExecutorRestarting,
    WorkerStartFailed,
    described,
)
from executor.futures import Answers, CallFuture, StepFuture
from executor.rank_group import RankGroup
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.step_codec import encode_step
from transport.clock import SYSTEM_CLOCK, Clock
from transport.message_queue import QueueStats
from transport.state_page import StatePage


class MultiprocExecutor(Executor):
    """Everything about the ranks that run is in `_group` and `_answers`; a restart replaces both."""

    def __init__(
        self, config: ExecutorConfig, page: StatePage | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`page`: where the ranks say what they do; it must outlive the executor."""
        super().__init__(config)
        self._clock = clock
        self._page = page
        self._group: RankGroup | None = None
        self._answers: Answers
        self._capacity: EngineCapacity
        self._seq = 0
        self._callback_lock = threading.Lock()
        self._callback: FailureCallback | None = None
        self._failure: ExecutorError | None = None
        self._group_lock = threading.Lock()  # a restart and a shutdown agree on which group is the last
        self._closing = threading.Event()
        self._restarting = False
        self._restarter: threading.Thread | None = None

    def initialize(self) -> EngineCapacity:
        group = self._make_group(None)
        self._answers = Answers(group, self._clock)
        self._capacity = group.start()
        return self._capacity

    def restart(self, after_s: float = 0.0) -> RestartFuture[None]:
        future: RestartFuture[None] = RestartFuture()
        with self._callback_lock:
            self._failure = None
        self._restarting = True
        self._restarter = threading.Thread(
            target=self._restart, args=(future, after_s), name="restart-ranks", daemon=True
        )
        self._restarter.start()
        return future

    def _restart(self, future: RestartFuture[None], after_s: float) -> None:
        try:
            self._replace_group(after_s)
        except ExecutorError as error:
            self._restarting = False
            future.set_exception(error)
        except Exception as error:  # the host is out of something
            self._restarting = False
            future.set_exception(WorkerStartFailed(0, None, "spawn", described(error)))
        else:
            self._restarting = False
            future.set_result(None)

    def _replace_group(self, after_s: float) -> None:
        if self._group is not None:
            self._group.stop(graceful=False)
            self._group = None
        gc.collect()  # the old group is a knot of references, and an engine's collector is set to run rarely
        self._closing.wait(after_s)
        group = self._make_group(self._capacity.num_gpu_blocks)
        self._answers = Answers(group, self._clock)
        group.start()
        try:
            for call in self._lasting_calls:
                timeout_s = self.config.execute_timeout_s
                self._call(group, call.method, timeout_s, call.args, dict(call.kwargs), None).result()
        except BaseException:
            group.stop(graceful=False)
            raise

    def _make_group(self, num_blocks: int | None) -> RankGroup:
        with self._group_lock:
            if self._closing.is_set():
                raise ExecutorClosed
            self._group = RankGroup(self.config, self._on_failure, num_blocks, self._page, self._clock)
            return self._group

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
        try:
            return self._call(self._running(), method, timeout_s, args, kwargs, reply_rank)
        except ExecutorError as error:
            return Completed(error=error)

    def _call(
        self,
        group: RankGroup,
        method: str,
        timeout_s: float,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reply_rank: int | None,
    ) -> CallFuture:
        seq = self._seq + 1
        parts = encode_call(Call(seq, method, args, kwargs, reply_rank))
        limit_s = max(timeout_s, self.config.execute_timeout_s)
        group.send(seq, parts, method=method, step_id=None, num_rows=None, limit_s=limit_s)
        self._seq = seq
        world_size = self.config.tensor_parallel_size
        future = CallFuture(self._answers, seq, method, world_size, reply_rank, timeout_s)
        self._answers.expect(future)
        return future

    def _running(self) -> RankGroup:
        if self._restarting:
            raise ExecutorRestarting
        if self._group is None:
            raise ExecutorClosed
        return self._group

    def queue_stats(self) -> dict[str, QueueStats]:
        group = self._group
        return group.queue_stats() if group is not None else {}

    def await_all_ranks(self) -> None:
        group = self._running()
        group.await_done(group.answered[OUTPUT_RANK])

    def whereabouts(self) -> dict[int, str]:
        group = self._group
        return group.whereabouts() if group is not None else {}

    def check_failed(self) -> None:
        if self._group is not None and not self._restarting:
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
        with self._group_lock:
            self._closing.set()
            group = self._group
        if group is not None:
            group.stop(graceful=True)
        if self._restarter is not None:
            self._restarter.join()  # its group is stopped, so it has nothing to wait for
