"""Ranks that do not get ready: the start ends with the culprit's name, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor.errors import ExecutorClosed, WorkerStartFailed
from executor.multiproc import MultiprocExecutor
from executor.uniproc import UniProcExecutor
from tests.executors import make, open_fds

PHASES = [
    ("__init__", "init"),
    ("init_device", "init"),
    ("load_model", "load"),
    ("kv_cache_capacity", "kv"),
    ("initialize_cache", "kv"),
]

HANG_S = 2.5  # more than a phase takes on a busy machine


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    fds = open_fds()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert open_fds() == fds
    assert threading.active_count() == 1


def start_failure(executor: MultiprocExecutor | UniProcExecutor) -> WorkerStartFailed:
    with pytest.raises(WorkerStartFailed) as caught:
        executor.initialize()
    executor.shutdown()
    return caught.value


def failing(at: str, kind: str, rank: int = 1, **config: Any) -> WorkerStartFailed:
    return start_failure(make(2, faults=[{"kind": kind, "at": at, "rank": rank}], **config))


@pytest.mark.parametrize(("at", "phase"), PHASES)
def test_a_rank_that_raises_is_named_with_its_error(at: str, phase: str) -> None:
    error = failing(at, "raise")
    assert (error.rank, error.phase, error.message) == (1, phase, "RuntimeError: as ordered")
    assert "about to raise" in error.stderr_tail and "Traceback" in error.stderr_tail
    assert f"failed in start phase '{phase}': RuntimeError: as ordered" in str(error)


@pytest.mark.parametrize(("at", "phase"), PHASES)
def test_a_rank_that_exits_is_named_with_its_exit_code(at: str, phase: str) -> None:
    error = failing(at, "exit", rank=0)
    assert (error.rank, error.phase, error.exit_code) == (0, phase, 3), error
    assert f"exited with code 3 in start phase '{phase}'" in str(error)
    assert "about to exit" in error.report()


@pytest.mark.parametrize(("at", "phase"), PHASES)
def test_a_rank_that_is_killed_is_named_with_the_signal(at: str, phase: str) -> None:
    error = failing(at, "kill")
    assert (error.rank, error.phase, error.signal_name) == (1, phase, "SIGKILL")
    assert f"was killed by SIGKILL in start phase '{phase}'" in str(error)


def test_a_rank_that_hangs_is_named_with_its_stack_in_whatever_phase() -> None:
    def hanging(at: str) -> WorkerStartFailed:
        return failing(at, "hang", start_timeout_s=HANG_S)

    with ThreadPoolExecutor(len(PHASES)) as pool:
        errors = list(pool.map(hanging, [at for at, _ in PHASES]))
    for error, (at, phase) in zip(errors, PHASES, strict=True):
        assert (error.rank, error.phase) == (1, phase)
        assert "not done after" in error.message
        assert at in error.stack and "in strike" in error.stack


def test_the_wait_for_a_slow_rank_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    failing("load_model", "hang", start_timeout_s=HANG_S, warn_after_s=0.2)
    lines = [record.getMessage() for record in caplog.records]
    lines = [line for line in lines if "waiting for rank 1" in line and "'load'" in line]
    assert len(lines) == 1 and f"'load', limit {HANG_S} s" in lines[0]


@pytest.mark.parametrize(
    ("worker_cls", "message"),
    [
        ("no_such_module:Worker", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.faulty_worker:NoSuchClass", "has no NoSuchClass"),
        ("tests.faulty_worker:NotAWorker", "it is not a subclass of executor.worker.Worker"),
        ("MockWorker", "expected the form package.module:name"),
        ("broken_worker:Worker", "importing broken_worker raised ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_worker_class_that_cannot_be_imported_is_named_with_the_reason(
    worker_cls: str, message: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_worker.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = make(1, worker_cls=worker_cls).config
    error = start_failure(UniProcExecutor(config) if backend == "uni" else MultiprocExecutor(config))
    assert error.phase == "import"
    assert f"cannot load worker class '{worker_cls}'" in str(error) and message in str(error)


def test_a_rank_that_exits_is_named_although_its_child_holds_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parent_worker.py").write_text(
        "import os, subprocess\n"
        "from executor.mock_worker import MockWorker\n"
        "class ParentWorker(MockWorker):\n"
        "    def load_model(self):\n"
        "        subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "        os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    error = start_failure(make(1, worker_cls="parent_worker:ParentWorker"))
    assert (error.rank, error.phase, error.exit_code) == (0, "load", 3), error


def test_a_worker_class_may_be_named_with_a_dot_and_live_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_worker.py").write_text(
        "from executor.mock_worker import MockWorker\n"
        "class MyWorker(MockWorker):\n    def name(self): return 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    executor = make(2, worker_cls="my_worker.MyWorker")
    executor.initialize()
    assert executor.collective_rpc("name") == ["mine", "mine"]
    executor.shutdown()


def test_a_module_that_hangs_while_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_worker.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = start_failure(make(2, worker_cls="hanging_worker:Worker", start_timeout_s=HANG_S))
    assert error.phase == "import" and "hanging_worker.py" in error.stack


def test_options_that_the_worker_does_not_have_are_named() -> None:
    error = start_failure(make(2, options={"mock_step_sm": 3}))
    assert error.phase == "init" and "mock_step_sm" in error.message


def test_ranks_with_different_models_do_not_start() -> None:
    error = start_failure(make(2, worker_cls="tests.faulty_worker:OtherModelOnRankOne"))
    assert error.rank == 1 and "its model differs from rank 0's" in error.message


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_cache_without_room_for_a_request_does_not_start(backend: str) -> None:
    config = make(1, options={"mock_num_blocks": 1}).config
    error = start_failure(UniProcExecutor(config) if backend == "uni" else MultiprocExecutor(config))
    assert error.phase == "kv" and "room for 1 blocks" in error.message


def test_a_length_that_the_model_does_not_allow_does_not_start() -> None:
    error = start_failure(make(2, options={"mock_max_model_len": 100}, max_model_len=200))
    assert error.phase == "load" and "max_model_len 200 exceeds the model's 100" in error.message


def test_a_failed_rank_does_not_leave_the_others_waiting() -> None:
    error = start_failure(make(4, faults=[{"kind": "raise", "at": "load_model", "rank": 3}]))
    assert error.rank == 3


def test_a_start_can_be_given_up_by_another_thread() -> None:
    executor = make(2, faults=[{"kind": "hang", "at": "load_model", "rank": 1}])
    stopper = threading.Timer(0.5, executor.shutdown)
    stopper.start()
    with pytest.raises(ExecutorClosed):
        executor.initialize()
    stopper.join()


def test_more_ranks_than_can_share_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 ranks"):
        make(65).initialize()
