"""The worker that misbehaves on order, in this process: what it does not order comes from the one inside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from executor.config import ExecutorConfig
from executor.errors import WorkerFailed, WorkerStartFailed
from executor.faulty_worker import FaultyWorker
from executor.uniproc import UniProcExecutor
from executor.worker import Worker
from tests.batch_driver import BatchDriver


def make(*faults: dict[str, Any], **options: Any) -> UniProcExecutor:
    worker_options = {"faults": list(faults), "mock_num_blocks": 100, "mock_max_model_len": 500, **options}
    return UniProcExecutor(
        ExecutorConfig(worker_cls="executor.faulty_worker:FaultyWorker", worker_options=worker_options)
    )


def test_every_method_of_a_worker_is_passed_on() -> None:
    methods = {name for name, value in vars(Worker).items() if callable(value)} - {"__init__"}
    assert methods <= set(vars(FaultyWorker))


def test_without_a_fault_it_is_the_worker_inside() -> None:
    executor = make()
    assert executor.initialize().num_gpu_blocks == 100
    driver = BatchDriver()
    driver.add([1, 2, 3])
    for _ in range(5):
        driver.run(executor.execute_model)
    assert executor.collective_rpc("list_loras") == [[]]
    executor.shutdown()


def test_a_fault_strikes_at_its_step_only() -> None:
    executor = make({"kind": "raise", "step": 3})
    executor.initialize()
    driver = BatchDriver()
    driver.add([1, 2, 3])
    driver.run(executor.execute_model)
    driver.run(executor.execute_model)
    with pytest.raises(WorkerFailed, match="ordered to raise in execute_model"):
        driver.run(executor.execute_model)


def test_a_fault_may_strike_in_any_method() -> None:
    with pytest.raises(WorkerStartFailed, match="'load'"):
        make({"kind": "raise", "at": "load_model"}).initialize()
    executor = make({"kind": "raise", "at": "check_health"})
    executor.initialize()
    with pytest.raises(WorkerFailed, match="ordered to raise in check_health"):
        executor.check_health()


def test_an_injected_fault_strikes_once() -> None:
    executor = make()
    executor.initialize()
    executor.collective_rpc("inject", args=({"kind": "raise", "at": "check_health"},))
    with pytest.raises(WorkerFailed):
        executor.check_health()
    executor.check_health()


def test_a_fault_with_a_file_strikes_once_for_all_processes(tmp_path: Path) -> None:
    fault = {"kind": "raise", "at": "load_model", "once": str(tmp_path / "once")}
    with pytest.raises(WorkerStartFailed):
        make(fault).initialize()
    make(fault).initialize()


def test_slow_is_slow() -> None:
    executor = make({"kind": "slow", "at": "check_health", "seconds": 0.1})
    executor.initialize()
    begin = time.monotonic()
    executor.check_health()
    assert time.monotonic() - begin >= 0.1


def test_an_unknown_fault_is_refused_at_the_start() -> None:
    with pytest.raises(WorkerStartFailed, match="explode"):
        make({"kind": "explode"}).initialize()
