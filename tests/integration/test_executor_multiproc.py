"""Ranks in processes of their own, when all goes well."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from executor.base import Executor, make_executor
from executor.config import ExecutorConfig
from executor.errors import ExecutorClosed, WorkerFailed, WorkerTimeout
from executor.multiproc import MultiprocExecutor
from executor.sampling_params import SamplingParams
from executor.step import ModelRunnerOutput
from executor.uniproc import UniProcExecutor
from tests.batch_driver import BatchDriver
from tests.executors import is_alive, make, open_fds, run_steps, running


@pytest.fixture(scope="module")
def executor() -> Iterator[MultiprocExecutor]:
    """Two ranks that the tests of calls share."""
    with running(2) as executor:
        yield executor


def traffic(executor: Executor) -> list[tuple[list[int], list[list[int]]]]:
    """Random chunks, preemptions and prefix hits; the outputs of all requests and each step's columns."""
    rng = np.random.default_rng(3)
    driver = BatchDriver(num_blocks=512)
    rows, columns = [], []
    common = rng.integers(0, 32000, 48).tolist()
    first = driver.add([*common, 7], SamplingParams(logprobs=2, prompt_logprobs=1))
    rows.append(first)
    driver.run(executor.execute_model)
    for step in range(60):
        if step % 9 == 8:
            row = next(r for r in reversed(driver.rows) if r.blocks[:1] != first.blocks[:1])
            driver.preempt(row)
            driver.enter(row)
        if rng.random() < 0.3 and len(driver.rows) < 20:
            if rng.random() < 0.5:
                rows.append(
                    driver.add([*common, *rng.integers(0, 99, 5).tolist()], shares=first, hit_blocks=3)
                )
            else:
                rows.append(driver.add(rng.integers(0, 32000, rng.integers(1, 90)).tolist()))
        chunks = {r: int(rng.integers(1, len(r.tokens) - r.computed + 1)) for r in driver.rows}
        output = driver.run(executor.execute_model, chunks)
        columns.append([a.tolist() for a in (output.num_sampled, *_logprobs(output))])
    for row in rows:
        row.assert_right()
    return [(row.output, []) for row in rows] + [([], column) for column in columns]


def _logprobs(output: ModelRunnerOutput) -> list[np.ndarray]:
    arrays = []
    for lines in [output.logprobs, *output.prompt_logprobs]:
        if lines is not None:
            arrays += [lines.token_ids, lines.logprobs, lines.ranks]
    return arrays


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_give_the_same_answers_as_one_process(ranks: int) -> None:
    uni = UniProcExecutor(ExecutorConfig(worker_options={"mock_num_blocks": 512}))
    uni.initialize()
    expected = traffic(uni)
    uni.shutdown()
    with running(ranks) as executor:
        assert traffic(executor) == expected


def test_all_ranks_have_the_same_pool_and_the_least_capacity_counts() -> None:
    executor = make(3, worker_cls="tests.faulty_worker:SmallRankOne")
    assert executor.initialize().num_gpu_blocks == 70
    assert executor.collective_rpc("num_blocks") == [70, 70, 70]
    executor.shutdown()


def test_a_given_number_of_blocks_wins_over_the_capacity() -> None:
    executor = make(2, worker_cls="tests.faulty_worker:SmallRankOne", num_gpu_blocks=40)
    assert executor.initialize().num_gpu_blocks == 40
    executor.shutdown()


def test_the_engine_learns_what_the_model_is() -> None:
    executor = make(2, options={"vocab_size": 77, "mock_max_model_len": 900}, max_model_len=500)
    capacity = executor.initialize()
    executor.shutdown()
    assert (capacity.vocab_size, capacity.max_model_len, capacity.dtype) == (77, 500, "float32")


def test_one_rank_stays_in_process_unless_told_otherwise() -> None:
    assert isinstance(make_executor(ExecutorConfig()), UniProcExecutor)
    assert isinstance(make_executor(ExecutorConfig(tensor_parallel_size=2)), MultiprocExecutor)
    assert isinstance(make_executor(ExecutorConfig(distributed_executor_backend="mp")), MultiprocExecutor)
    with pytest.raises(ValueError, match="cannot hold 2 ranks"):
        make_executor(ExecutorConfig(tensor_parallel_size=2, distributed_executor_backend="uni"))


def test_a_prompt_larger_than_the_ring_reaches_the_ranks() -> None:
    options = {"mock_num_blocks": 1 << 18, "mock_max_model_len": 1 << 21}
    with running(2, options=options, max_num_seqs=2) as executor:
        driver = BatchDriver(num_blocks=1 << 18)
        row = driver.add(np.arange((1 << 21) - 10, dtype=np.int32).tolist())
        driver.run(executor.execute_model)
        driver.run(executor.execute_model)
        row.assert_right()


def test_ranks_have_their_own_session_and_ignore_ctrl_c(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("session") == executor.pids
    assert executor.collective_rpc("signals_ignored") == [True, True]


def test_the_smallest_worker_serves() -> None:
    with running(2, worker_cls="examples.minimal_worker:MinimalWorker", options={}) as executor:
        for row in run_steps(executor, 10).rows:
            assert len(row.output) == 10 and max(row.output) < 512


# Calls


def test_a_call_is_answered_by_every_rank_in_order(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("echo", args=(1, "x"), kwargs={"k": None}) == [
        [0, 1, "x", {"k": None}],
        [1, 1, "x", {"k": None}],
    ]


def test_one_ranks_answer_can_be_asked_for_alone(executor: MultiprocExecutor) -> None:
    assert executor.collective_rpc("echo", unique_reply_rank=1) == [1, {}]
    with pytest.raises(ValueError, match="no rank 2"):
        executor.collective_rpc("echo", unique_reply_rank=2)


def test_arrays_travel_both_ways(executor: MultiprocExecutor) -> None:
    sent = np.arange(12, dtype=np.float64).reshape(3, 4)
    for answer in executor.collective_rpc("echo", args=(sent,)):
        assert answer[1].dtype == sent.dtype and np.array_equal(answer[1], sent)


def test_a_method_that_raises_fails_its_call_and_nothing_else(executor: MultiprocExecutor) -> None:
    for reply_rank in (None, 0):
        with pytest.raises(
            WorkerFailed, match="failed in fail_on: ValueError: rank 1 was asked to"
        ) as caught:
            executor.collective_rpc("fail_on", args=(1,), unique_reply_rank=reply_rank)
        assert (caught.value.rank, caught.value.pid) == (1, executor.pids[1])
        assert "in fail_on" in caught.value.stderr_tail
    assert executor.collective_rpc("echo") == [[0, {}], [1, {}]]


@pytest.mark.parametrize("method", ["no_such_method", "_judge", "rank"])
def test_only_public_methods_can_be_called(executor: MultiprocExecutor, method: str) -> None:
    with pytest.raises(WorkerFailed, match=f"FaultyWorker has no method '{method}'"):
        executor.collective_rpc(method)


def test_what_cannot_travel_is_refused_on_either_side(executor: MultiprocExecutor) -> None:
    with pytest.raises(TypeError, match="neither plain data nor a numpy array"):
        executor.collective_rpc("echo", args=(object(),))
    with pytest.raises(WorkerFailed, match="object is neither plain data nor a numpy array"):
        executor.collective_rpc("unspeakable")
    assert executor.collective_rpc("echo") == [[0, {}], [1, {}]]


def test_a_call_that_takes_too_long_names_who_did_not_answer(executor: MultiprocExecutor) -> None:
    with pytest.raises(WorkerTimeout, match=r"rank 1 .* within 0.1 s in nap") as caught:
        executor.collective_rpc("nap", timeout=0.1, args=(0.5, 1))
    assert (caught.value.rank, caught.value.ranks, caught.value.method) == (1, (1,), "nap")


def test_a_late_answer_is_never_taken_for_another(executor: MultiprocExecutor) -> None:
    for i in range(3):
        with pytest.raises(WorkerTimeout):
            executor.collective_rpc("nap", timeout=0.05, args=(0.2, i % 2))
        assert executor.collective_rpc("echo", args=(i,)) == [[0, i, {}], [1, i, {}]]


def test_futures_may_be_asked_in_any_order(executor: MultiprocExecutor) -> None:
    futures = [executor.collective_rpc("echo", args=(i,), non_block=True) for i in range(5)]
    for i in (3, 0, 4, 1, 2):
        assert futures[i].result() == [[0, i, {}], [1, i, {}]]
        assert futures[i].done()
        assert futures[i].result() == futures[i].result()


def test_a_future_says_when_it_is_done_without_waiting(executor: MultiprocExecutor) -> None:
    nap = executor.collective_rpc("nap", args=(0.3,), non_block=True)
    after = executor.collective_rpc("echo", non_block=True)
    assert not nap.done() and not after.done()
    with pytest.raises(WorkerTimeout):
        after.result(timeout=0.05)
    assert after.result() == [[0, {}], [1, {}]]
    assert nap.done() and nap.result() == [0.3, 0.3]


def test_a_call_given_up_in_the_queue_does_not_disturb_the_next(executor: MultiprocExecutor) -> None:
    late = executor.collective_rpc("nap", timeout=0.05, args=(0.3,), non_block=True)
    after = executor.collective_rpc("echo", args=(9,), non_block=True)
    assert after.result() == [[0, 9, {}], [1, 9, {}]]
    with pytest.raises(WorkerTimeout):
        late.result()


def test_the_next_step_can_be_sent_before_the_answer_to_the_last() -> None:
    with running(2, options={"mock_step_ms": 5}) as executor:
        driver = BatchDriver()
        row = driver.add([1, 2, 3])
        flight = []
        for _ in range(20):
            # One step ahead: the token that the running step samples is not known here, but to the ranks.
            count = 3 if row.computed == 0 else 1
            step = driver.build({row: count})
            row.computed += count
            flight.append(executor.execute_model(step, non_block=True))
            if len(flight) == 2:
                row.tokens += flight.pop(0).result().sampled_token_ids[0].tolist()
        row.tokens += flight[0].result().sampled_token_ids[0].tolist()
        row.assert_right()
        assert len(row.output) == 20


def test_calls_and_steps_keep_their_order() -> None:
    with running(2) as executor:
        driver = BatchDriver()
        driver.add([1, 2, 3])
        step = executor.execute_model(driver.build(dict.fromkeys(driver.rows, 3)), non_block=True)
        call = executor.collective_rpc("echo", args=(1,), non_block=True)
        assert call.result() == [[0, 1, {}], [1, 1, {}]]
        assert step.done() and step.result().num_sampled.tolist() == [1]


# The end


def test_shutdown_lets_the_ranks_finish(tmp_path: object) -> None:
    log = f"{tmp_path}/log"
    executor = make(2, options={"log": log})
    executor.initialize()
    run_steps(executor, 3)
    pids = executor.pids
    executor.shutdown()
    assert not any(map(is_alive, pids))
    with open(log) as lines:
        assert sorted(lines) == ["rank 0 shut down\n", "rank 1 shut down\n"]
    executor.shutdown()
    with pytest.raises(ExecutorClosed):
        executor.collective_rpc("echo")
    future = executor.execute_model(BatchDriver().build({}), non_block=True)
    with pytest.raises(ExecutorClosed):
        future.result()


def test_an_executor_that_was_never_started_can_be_shut_down() -> None:
    executor = make(2)
    with pytest.raises(ExecutorClosed):
        executor.collective_rpc("echo")
    executor.shutdown()


def test_shutdown_from_another_thread_ends_a_wait() -> None:
    with running(2) as executor:
        stopper = threading.Timer(0.2, executor.shutdown)
        stopper.start()
        with pytest.raises(ExecutorClosed):
            executor.collective_rpc("nap", args=(0.4,))
        stopper.join()


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    executor = make(2, faults=[{"kind": "hang", "at": "shutdown", "rank": 1}], stop_grace_s=0.4)
    executor.initialize()
    executor.collective_rpc("ignore_sigterm")
    pids = executor.pids
    started = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - started >= 0.4
    assert not any(map(is_alive, pids))


def test_a_rank_that_is_busy_gets_sigterm_at_half_its_grace() -> None:
    executor = make(2, stop_grace_s=0.4)
    executor.initialize()
    pids = executor.pids
    executor.collective_rpc("nap", args=(60,), non_block=True)
    executor.shutdown()
    assert not any(map(is_alive, pids))


def test_starting_and_stopping_leaves_no_descriptor_and_no_thread() -> None:
    with running(2) as executor:
        run_steps(executor, 2)
    fds, threads = open_fds(), threading.active_count()
    for _ in range(4):
        with running(2) as executor:
            run_steps(executor, 2)
    assert (open_fds(), threading.active_count()) == (fds, threads)
