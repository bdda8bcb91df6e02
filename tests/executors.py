"""What tests of executors share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from executor.base import Executor
from executor.config import ExecutorConfig
from executor.multiproc import MultiprocExecutor
from tests.batch_driver import BatchDriver

FAULTY = "tests.faulty_worker:FaultyWorker"


def make(
    ranks: int = 2,
    *,
    worker_cls: str = FAULTY,
    faults: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> MultiprocExecutor:
    worker_options = {"mock_num_blocks": 512, **(options or {})}
    if faults is not None:
        worker_options["faults"] = faults
    return MultiprocExecutor(
        ExecutorConfig(
            worker_cls=worker_cls,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            worker_options=worker_options,
            **config,
        )
    )


@contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[MultiprocExecutor]:
    executor = make(*args, **kwargs)
    executor.initialize()
    try:
        yield executor
    finally:
        executor.shutdown()


def run_steps(executor: Executor, steps: int, requests: int = 3) -> BatchDriver:
    driver = BatchDriver()
    for i in range(requests):
        driver.add([i + 1] * (20 + i))
    for _ in range(steps):
        driver.run(executor.execute_model)
    return driver


def wait_until(what: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
