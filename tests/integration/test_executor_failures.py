"""Ranks that fail while they serve: noticed at once, named, and the first cause is what everybody gets."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executor.errors import ExecutorError, WorkerFailed, WorkerTimeout
from executor.multiproc import MultiprocExecutor
from executor.uniproc import UniProcExecutor
from tests.batch_driver import BatchDriver
from tests.executors import is_alive, make, run_steps, running, wait_until

# Only the output rank is waited for: of another one's failure the executor hears a moment later.
SLOW = {"mock_step_ms": 10}


@pytest.fixture
def failures() -> Iterator[queue.Queue[ExecutorError]]:
    """What the failure callback hears; it must hear the first error, and that once."""
    heard: queue.Queue[ExecutorError] = queue.Queue()
    yield heard
    assert heard.empty()


def step_failure(executor: MultiprocExecutor | UniProcExecutor, steps: int = 3) -> ExecutorError:
    with pytest.raises(ExecutorError) as caught:
        run_steps(executor, steps)
    return caught.value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_while_idle_is_heard_at_once(rank: int, failures: queue.Queue[ExecutorError]) -> None:
    with running(2) as executor:
        executor.set_failure_callback(failures.put)
        run_steps(executor, 2)
        time.sleep(0.1)  # only rank 0 answers a step: the other may still be at it
        pid = executor.pids[rank]
        os.kill(pid, signal.SIGKILL)
        error = failures.get(timeout=5)
        assert isinstance(error, WorkerFailed)
        assert (error.rank, error.pid, error.signal_name, error.method) == (rank, pid, "SIGKILL", None)
        assert str(error) == f"worker rank {rank} (pid {pid}) was killed by SIGKILL while idle"
        for use in (executor.check_failed, executor.check_health, lambda: run_steps(executor, 1)):
            with pytest.raises(WorkerFailed) as caught:
                use()
            assert caught.value is error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_kill_in_a_step_ends_the_wait_for_it(
    rank: int, signum: signal.Signals, failures: queue.Queue[ExecutorError]
) -> None:
    with running(2, options={"mock_step_ms": 5000}) as executor:
        executor.set_failure_callback(failures.put)
        driver = BatchDriver()
        driver.add([1] * 20)
        future = executor.execute_model(driver.build(dict.fromkeys(driver.rows, 20)), non_block=True)
        behind = executor.execute_model(driver.build({}), non_block=True)
        pid = executor.pids[rank]
        threading.Timer(0.2, os.kill, (pid, signum)).start()
        started = time.monotonic()
        with pytest.raises(WorkerFailed) as caught:
            future.result()
        assert time.monotonic() - started < 4  # the step would have taken 5 s
        error = caught.value
        assert (error.rank, error.pid, error.signal_name) == (rank, pid, signum.name)
        assert (error.method, error.step_id) == ("execute_model", 1)
        with pytest.raises(WorkerFailed) as caught:
            behind.result()
        assert caught.value is error is failures.get(timeout=5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_in_a_step_is_named_with_its_error(
    rank: int, failures: queue.Queue[ExecutorError]
) -> None:
    with running(2, options=SLOW, faults=[{"kind": "raise", "rank": rank, "step": 2}]) as executor:
        executor.set_failure_callback(failures.put)
        error = step_failure(executor, 50)
        assert isinstance(error, WorkerFailed)
        assert (error.rank, error.method, error.step_id) == (rank, "execute_model", 2)
        assert error.message == "RuntimeError: as ordered"
        assert "about to raise" in error.stderr_tail and "in execute_model" in error.report()
        assert failures.get(timeout=5) is error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_in_a_step_is_named_with_its_code(rank: int) -> None:
    with running(2, options=SLOW, faults=[{"kind": "exit", "rank": rank, "step": 2}]) as executor:
        error = step_failure(executor, 50)
        assert isinstance(error, WorkerFailed)
        assert (error.rank, error.exit_code, error.signal_name) == (rank, 3, None)
        assert "exited with code 3 in execute_model of step 2" in str(error)
        assert error.stderr_tail.endswith("about to exit")


def test_a_death_is_the_cause_of_what_the_peers_report() -> None:
    """Rank 0 raises at the very moment rank 1 dies, as when it loses a peer in a collective operation."""
    faults = [{"kind": "raise", "rank": 0, "step": 2}, {"kind": "kill", "rank": 1, "step": 2}]
    with running(2, faults=faults) as executor:
        error = step_failure(executor)
        assert (error.rank, error.signal_name) == (1, "SIGKILL")  # type: ignore[attr-defined]


def test_a_rank_that_raises_runs_no_further_step() -> None:
    with running(2, faults=[{"kind": "raise", "rank": 0, "step": 1}]) as executor:
        driver = BatchDriver()
        driver.add([1])
        futures = [executor.execute_model(driver.build({}), non_block=True) for _ in range(3)]
        errors = []
        for future in futures:
            with pytest.raises(WorkerFailed) as caught:
                future.result()
            errors.append(caught.value)
        assert errors == [errors[0]] * 3 and errors[0].step_id == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stuck_rank_is_named_with_its_stack(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    faults = [{"kind": "hang", "rank": rank, "step": 2}]
    with running(2, faults=faults, execute_timeout_s=0.8, warn_after_s=0.3) as executor:
        run_steps(executor, 1)
        heard: queue.Queue[ExecutorError] = queue.Queue()
        executor.set_failure_callback(heard.put)
        driver = BatchDriver()
        executor.execute_model(driver.build({}), non_block=True)
        executor.execute_model(driver.build({}), non_block=True)
        error = heard.get(timeout=5)
        assert isinstance(error, WorkerTimeout)
        assert (error.rank, error.pid, error.ranks) == (rank, executor.pids[rank], (rank,))
        assert (error.method, error.step_id) == ("execute_model", 2)
        assert "in strike" in error.stack and "in execute_model" in error.report()
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == "executor"]
    steps = [line for line in lines if "in execute_model of step 2 with 0 requests" in line]
    assert len(steps) == 1 and f"waiting for rank {rank}" in steps[0]


def test_a_stopped_rank_is_blamed_before_those_that_may_wait_for_it() -> None:
    faults = [{"kind": "hang", "rank": 0, "step": 2}]
    with running(2, faults=faults, execute_timeout_s=0.8) as executor:
        driver = BatchDriver()
        os.kill(executor.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerTimeout) as caught:
            executor.execute_model(driver.build({}))
            executor.execute_model(driver.build({}))
        assert (caught.value.rank, caught.value.state) == (1, "T (stopped)")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not an output", "returned dict, not ModelRunnerOutput"),
        ("wrong step", "the output is of step 2, the step is 1"),
        ("missing row", r"sampled_token_ids is int32 \(2, 1\), not int32 \(3, 1 or more\)"),
        ("flat tokens", r"sampled_token_ids is int32 \(3,\), not int32 \(3, 1 or more\)"),
        ("wrong dtype", "the dtypes are int64 and int32, not int32"),
        ("too many", "row 0 sampled 2 tokens instead of 1"),
        ("none sampled", "row 0 sampled 0 tokens instead of 1"),
        ("beyond the vocabulary", "is not in the vocabulary of 32000"),
        ("negative", "is not in the vocabulary of 32000"),
    ],
)
def test_an_output_that_does_not_answer_its_step_fails_the_rank(kind: str, message: str) -> None:
    config = make(1, faults=[{"kind": kind}]).config
    executor = UniProcExecutor(config)
    executor.initialize()
    error = step_failure(executor)
    executor.shutdown()
    with pytest.raises(
        WorkerFailed, match=f"failed in execute_model of step 1: BadWorkerOutput: .*{message}"
    ):
        raise error


def test_a_wrong_output_of_any_rank_is_noticed_across_processes() -> None:
    with running(2, options=SLOW, faults=[{"kind": "missing row", "rank": 1, "step": 2}]) as executor:
        error = step_failure(executor, 50)
        assert isinstance(error, WorkerFailed) and error.rank == 1 and "BadWorkerOutput" in str(error)


@pytest.mark.parametrize("garbage", [b"", b"rubbish", bytes(64)])
def test_bytes_that_are_no_answer_fail_the_rank(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(1) as executor:
        run_steps(executor, 1)
        answers: Any = executor._group._answers[0]  # type: ignore[union-attr]
        monkeypatch.setattr(answers, "dequeue_copy", lambda timeout_s: garbage)
        with pytest.raises(WorkerFailed, match=r"rank 0 .* of step 1: sent an answer that is none"):
            executor.execute_model(BatchDriver().build({}))


def test_one_process_tells_failures_as_many_do(failures: queue.Queue[ExecutorError]) -> None:
    executor = UniProcExecutor(make(1, faults=[{"kind": "raise", "step": 2}]).config)
    executor.initialize()
    executor.set_failure_callback(failures.put)
    error = step_failure(executor)
    assert isinstance(error, WorkerFailed)
    assert (error.rank, error.pid, error.step_id) == (0, os.getpid(), 2)
    assert isinstance(error.__cause__, RuntimeError) and "in execute_model" in error.stderr_tail
    with pytest.raises(WorkerFailed, match="of step 2: RuntimeError: as ordered"):
        executor.collective_rpc("echo")
    assert failures.get(timeout=5) is error
    executor.shutdown()


def test_a_callback_set_after_the_failure_hears_it() -> None:
    with running(2) as executor:
        os.kill(executor.pids[1], signal.SIGKILL)
        assert wait_until(lambda: fails(executor.check_failed))
        heard: list[ExecutorError] = []
        executor.set_failure_callback(heard.append)
        assert [error.rank for error in heard] == [1]  # type: ignore[attr-defined]


def test_workers_errors_reach_the_terminal_with_the_ranks_name(capfd: pytest.CaptureFixture[str]) -> None:
    with running(2, options=SLOW, faults=[{"kind": "raise", "rank": 1, "step": 1}]) as executor:
        step_failure(executor, 50)
        pid = executor.pids[1]
    assert f"(rank 1 pid {pid}) about to raise\n" in capfd.readouterr().err


def fails(use: Callable[[], None]) -> bool:
    try:
        use()
    except ExecutorError:
        return True
    return False


# Nothing outlives its owner


PARENT = """
    import sys, time
    from tests.executors import make
    executor = make(2, options={"mock_step_ms": 60000})
    executor.initialize()
    grandchildren = executor.collective_rpc("start_grandchild") if "family" in sys.argv else []
    if "busy" in sys.argv:
        from tests.batch_driver import BatchDriver
        executor.execute_model(BatchDriver().build({}), non_block=True)
    print(*executor.pids, *grandchildren, flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_ranks_do_not_outlive_a_killed_executor(state: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), "wait", state], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 2 and all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_ranks_do_not_outlive_an_executor_that_forgot_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT)], capture_output=True, text=True, timeout=30
    )
    pids = list(map(int, done.stdout.split()))
    assert done.returncode == 0 and len(pids) == 2
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_a_starting_rank_does_not_outlive_a_killed_executor() -> None:
    script = """
        import sys
        from tests.executors import make
        make(2, faults=[{"kind": "hang", "at": "load_model", "rank": r} for r in (0, 1)]).initialize()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True
    )
    assert parent.stderr is not None
    pids = [int(parent.stderr.readline().split()[3].strip(")")) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stderr.close()
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_what_a_worker_started_ends_with_it() -> None:
    with running(2) as executor:
        grandchildren = executor.collective_rpc("start_grandchild")
        assert all(map(is_alive, grandchildren))
    assert wait_until(lambda: not any(map(is_alive, grandchildren)))
    with running(2) as executor:
        grandchildren = executor.collective_rpc("start_grandchild")
        os.kill(executor.pids[1], signal.SIGKILL)
        assert wait_until(lambda: fails(executor.check_failed))
    assert wait_until(lambda: not any(map(is_alive, grandchildren)))


def test_a_group_can_be_made_anew_after_a_failure() -> None:
    executor = make(2)
    executor.initialize()
    os.kill(executor.pids[0], signal.SIGKILL)
    assert wait_until(lambda: fails(executor.check_failed))
    executor.shutdown()
    with running(2) as again:
        for row in run_steps(again, 5).rows:
            row.assert_right()
