"""The worker in the engine's own process: for one rank, for debugging, and for tests that step by step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future as RestartFuture
from typing import Any

from executor.base import Completed, EngineCapacity, Executor, FailureCallback, check_capacity
from executor.config import ExecutorConfig
from executor.errors import (
    ExecutorClosed,
    ExecutorError,
    WorkerFailed,
    WorkerStartFailed,
    described,
    traceback_of,
)
from executor.host import PAGE_PHASES, WorkerHost
from executor.step import ModelRunnerOutput, SchedulerOutput
from transport.clock import SYSTEM_CLOCK
from transport.state_page import StatePage
from transport.state_rows import RankRow

logger = logging.getLogger("executor")


class UniProcExecutor(Executor):
    """Runs each call before it returns, so every future is done. Deadlines cannot be kept: nobody is there
    to."""

    def __init__(self, config: ExecutorConfig, page: StatePage | None = None) -> None:
        """`page`: where to say what the rank does; it must outlive the executor."""
        if config.tensor_parallel_size != 1:
            raise ValueError(f"one process cannot hold {config.tensor_parallel_size} ranks")
        super().__init__(config)
        self._host = WorkerHost(config, rank=0, world_size=1)
        self._failure: ExecutorError | None = None
        self._callback: FailureCallback | None = None
        self._row: RankRow | None = None
        self._num_calls = 0
        if page is not None:
            self._row = page.rank(0)
            self._row.claim()

    def initialize(self) -> EngineCapacity:
        self._capacity = self._start(None)
        return self._capacity

    def restart(self, after_s: float = 0.0) -> RestartFuture[None]:
        """Waits itself, so the future is done. A worker that fails to shut down is left to the garbage
        collector."""
        future: RestartFuture[None] = RestartFuture()
        try:
            if isinstance(self._failure, ExecutorClosed):
                raise self._failure
            self._let_go()
            time.sleep(after_s)
            self._host = WorkerHost(self.config, rank=0, world_size=1)
            self._start(self._capacity.num_gpu_blocks)
            for call in self._lasting_calls:
                self._host.call(call.method, call.args, dict(call.kwargs))
        except ExecutorError as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(WorkerStartFailed(0, os.getpid(), "ready", described(error)))
        else:
            self._failure = None
            self._enter("waiting")
            future.set_result(None)
        return future

    def _let_go(self) -> None:
        try:
            self._host.shutdown()
        except Exception:
            logger.warning("the failed worker could not be shut down", exc_info=True)

    def _start(self, num_blocks: int | None) -> EngineCapacity:
        """`num_blocks`: KV blocks to have, neither more nor fewer; None: as many as there is room for."""
        phase = "import"

        def enter_phase(name: str) -> None:
            nonlocal phase
            phase = name
            self._enter(PAGE_PHASES[name])

        try:
            room = self._host.start(enter_phase)
            check_capacity(room, num_blocks)
            num_blocks = room if num_blocks is None else num_blocks
            self._host.initialize_cache(num_blocks)
        except (Exception, SystemExit) as error:
            self._fail(error)
            self._host.shutdown()
            raise WorkerStartFailed(
                0, os.getpid(), phase, described(error), stderr_tail=traceback_of(error)
            ) from error
        self._enter("waiting")
        model = self._host.model
        return EngineCapacity(
            num_blocks, model.vocab_size, self._host.max_model_len, model.dtype, model.eos_token_id
        )

    def _submit_step(self, step: SchedulerOutput) -> Completed[ModelRunnerOutput]:
        if self._failure is not None:
            return Completed(error=self._failure)
        row = self._row
        if row is not None:
            self._num_calls += 1
            row.begin_step(self._num_calls, step.step_id, SYSTEM_CLOCK.monotonic())
        try:
            output = self._host.execute(step)
        except (Exception, SystemExit) as error:
            self._fail(error)
            failure = self._failed("execute_model", step.step_id, error)
            self._failure = failure
            if self._callback is not None:
                self._callback(failure)
            return Completed(error=failure)
        if row is not None:
            row.end(SYSTEM_CLOCK.monotonic())
        return Completed(output)

    def _submit_call(
        self,
        method: str,
        timeout_s: float,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reply_rank: int | None,
    ) -> Completed[Any]:
        if self._failure is not None:
            return Completed(error=self._failure)
        row = self._row
        if row is not None:
            self._num_calls += 1
            row.begin(self._num_calls, method, SYSTEM_CLOCK.monotonic())
        try:
            answer = self._host.call(method, args, kwargs)
        except (Exception, SystemExit) as error:
            return Completed(error=self._failed(method, None, error))
        finally:
            if row is not None:
                row.end(SYSTEM_CLOCK.monotonic())
        return Completed(answer if reply_rank is not None else [answer])

    def _enter(self, phase: str) -> None:
        if self._row is not None:
            self._row.enter(phase, SYSTEM_CLOCK.monotonic())

    def _fail(self, error: BaseException) -> None:
        if self._row is not None:
            self._row.error = described(error)
            self._enter("failed")

    def _failed(self, method: str, step_id: int | None, error: BaseException) -> WorkerFailed:
        failure = WorkerFailed(
            0,
            os.getpid(),
            method,
            step_id,
            message=described(error),
            stderr_tail=traceback_of(error),
        )
        failure.__cause__ = error
        return failure

    def await_all_ranks(self) -> None:
        """The only rank has done the step, since it has answered."""

    def check_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def set_failure_callback(self, callback: FailureCallback) -> None:
        self._callback = callback
        if self._failure is not None and not isinstance(self._failure, ExecutorClosed):
            callback(self._failure)

    def shutdown(self) -> None:
        if not isinstance(self._failure, ExecutorClosed):
            self._failure = ExecutorClosed()
            self._host.shutdown()
