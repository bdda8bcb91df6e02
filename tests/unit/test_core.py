"""The step loop: how many steps are in flight, and when outputs, aborts and failures come out."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.config import ConfigError, EngineConfig
from engine_core.core import EngineCore
from engine_core.errors import RequestError
from engine_core.protocol import FinishReason
from executor.base import Completed, Executor, make_executor
from executor.errors import WorkerFailed
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.uniproc import UniProcExecutor
from tests.scheduling import CheckedCore, make_request


def make_config(**fields: Any) -> EngineConfig:
    return EngineConfig(num_gpu_blocks_override=50, max_model_len=500, max_num_seqs=8, **fields)


class Recorder(UniProcExecutor):
    """Notes the steps that are sent and those whose answers are taken."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.executor_config())
        self.log: list[str] = []

    def _submit_step(self, step: SchedulerOutput) -> Completed[ModelRunnerOutput]:
        self.log.append(f"send {step.step_id}")
        done = super()._submit_step(step)
        log = self.log

        class Noted(Completed[ModelRunnerOutput]):
            def result(self, timeout: float | None = None) -> ModelRunnerOutput:
                log.append(f"take {step.step_id}")
                return done.result(timeout)

        return Noted()


def run(core: EngineCore, steps: int) -> None:
    for _ in range(steps):
        core.step_fn()


def test_without_async_scheduling_one_step_is_in_flight() -> None:
    config = make_config(async_scheduling=False)
    executor = Recorder(config)
    core = EngineCore(config, executor)
    core.add_request(make_request("r", [1, 2], core.scheduler, max_tokens=3))
    run(core, 3)
    assert executor.log == ["send 1", "take 1", "send 2", "take 2", "send 3", "take 3"]


def test_with_async_scheduling_the_next_step_is_sent_before_an_answer_is_taken() -> None:
    config = make_config(async_scheduling=True)
    executor = Recorder(config)
    core = EngineCore(config, executor)
    core.add_request(make_request("r", [1, 2], core.scheduler, max_tokens=9))
    run(core, 4)
    assert executor.log == ["send 1", "send 2", "take 1", "send 3", "take 2", "send 4", "take 3"]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_end_is_announced_and_then_there_is_no_work(is_async: bool) -> None:
    checked = CheckedCore(make_config(async_scheduling=is_async))
    checked.add("r", [1, 2], max_tokens=3)
    checked.run()
    checked.assert_tokens_right()
    assert not checked.core.has_work and not checked.scheduler.has_requests()
    assert checked.core.step_fn() == {}


def test_an_idle_step_is_not_sent() -> None:
    """With both of its last tokens in flight a request gives no step to run, and nobody is woken for it."""
    config = make_config(async_scheduling=True)
    executor = Recorder(config)
    core = EngineCore(config, executor)
    core.add_request(make_request("r", [1, 2], core.scheduler, max_tokens=2))
    while core.has_work:
        core.step_fn()
    sent = [entry for entry in executor.log if entry.startswith("send")]
    assert sent == ["send 1", "send 2", "send 4"]  # 3 had nothing to run; 4 tells that the request ended


def test_aborts_that_come_while_a_step_runs_hold_back_its_tokens() -> None:
    aborts: list[str] = []

    def take_aborts() -> list[str]:
        taken = aborts.copy()
        aborts.clear()
        return taken

    checked = CheckedCore(make_config(async_scheduling=False), take_aborts=take_aborts)
    checked.add("stays", [1, 2])
    checked.add("goes", [3, 4])
    checked.step()
    aborts.append("goes")
    assert sorted(checked.step()) == ["stays"]
    assert list(checked.scheduler.requests) == ["stays"]


def test_a_request_that_is_to_be_aborted_at_once_never_runs() -> None:
    checked = CheckedCore(make_config())
    request = checked.add("r", [1, 2], abort_immediately=True)
    assert request.finish_reason is FinishReason.ABORT
    checked.run()
    assert checked.requests["r"].tokens == []


def test_a_refused_request_leaves_no_trace() -> None:
    checked = CheckedCore(make_config())
    checked.add("r", [1, 2])
    with pytest.raises(RequestError):
        checked.core.add_request(make_request("r", [1], checked.scheduler))
    checked.run()
    checked.assert_tokens_right()


def test_options_that_do_not_suit_the_model_stop_the_start() -> None:
    config = make_config(long_prefill_token_threshold=600)
    executor = make_executor(config.executor_config())
    with pytest.raises(ConfigError, match="long_prefill_token_threshold"):
        EngineCore(config, executor)


def test_a_failing_worker_ends_the_step_with_its_error() -> None:
    class Failing(UniProcExecutor):
        def _submit_step(self, step: SchedulerOutput) -> Completed[ModelRunnerOutput]:
            return Completed(error=WorkerFailed(0, 1, "execute_model", step.step_id, message="out of luck"))

    config = make_config(on_worker_failure="fail")
    executor: Executor = Failing(config.executor_config())
    core = EngineCore(config, executor)
    core.add_request(make_request("r", [1, 2], core.scheduler))
    with pytest.raises(WorkerFailed, match="out of luck"):
        run(core, 2)


def test_shutdown_is_idempotent() -> None:
    core = CheckedCore(make_config()).core
    core.shutdown()
    core.shutdown()
