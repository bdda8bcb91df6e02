"""Failures of the workers lose no request and no token; only a request that makes them fail ends.

In process and single-stepped; tests/integration/test_failures_*.py has the processes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_core.config import EngineConfig
from engine_core.protocol import FinishReason
from engine_core.recovery import RestartImpossible, RestartsExhausted
from engine_core.scheduler.scheduler import PauseState
from executor.errors import WorkerFailed, WorkerStartFailed
from tests.scheduling import CheckedCore, random_workload

FAULTY = "executor.faulty_worker:FaultyWorker"
POISON = 31_999

both_modes = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def make(*faults: dict[str, Any], is_async: bool = True, **fields: Any) -> CheckedCore:
    config = EngineConfig(
        worker_cls=FAULTY,
        worker_options={"faults": list(faults), "mock_num_blocks": 500, "mock_max_model_len": 2000},
        async_scheduling=is_async,
        **fields,
    )
    return CheckedCore(config)


def prompt_of(i: int, length: int = 20) -> list[int]:
    rng = random.Random(i)
    return [rng.randrange(1000) for _ in range(length)]


@both_modes
@pytest.mark.parametrize("step", [1, 2, 3, 10, 11, 23])
@pytest.mark.parametrize("kind", ["raise", "garbage"])
def test_a_failure_at_any_step_loses_and_repeats_no_token(kind: str, step: int, is_async: bool) -> None:
    checked = make({"kind": kind, "step": step}, is_async=is_async)
    for i in range(5):
        checked.add(str(i), prompt_of(i), max_tokens=20 + i)
    checked.run()
    checked.assert_tokens_right()
    assert checked.core.num_restarts == 1
    assert [len(outcome.tokens) for outcome in checked.requests.values()] == [20, 21, 22, 23, 24]
    assert {outcome.finish_reason for outcome in checked.requests.values()} == {FinishReason.LENGTH}


@both_modes
@pytest.mark.parametrize("seed", range(6))
def test_random_failures_in_random_work_lose_and_repeat_no_token(seed: int, is_async: bool) -> None:
    """Random options, arrivals, aborts, cache resets and pauses."""
    work = random_workload(seed, is_async=is_async, vocab_size=1000)
    rng = random.Random(seed)
    # Far apart: a request that fails alone twice without a token in between would be taken for the culprit.
    faults = [{"kind": "raise", "step": step + rng.randrange(20)} for step in range(1, 500, 70)]
    config = msgspec.structs.replace(
        work.config,
        num_gpu_blocks_override=work.num_blocks,
        max_model_len=work.max_model_len,
        worker_cls=FAULTY,
        worker_options={**work.config.worker_options, "faults": faults},
        max_worker_restarts=1000,
    )
    checked = CheckedCore(config)
    step = 0
    while step <= work.last_event or checked.core.has_work:
        for spec in work.arrivals.pop(step, ()):
            checked.add(spec["request_id"], **spec["fields"])
        checked.abort(*work.aborts.pop(step, ()))
        work.before_step(step, checked.scheduler)
        if checked.core.has_work:
            checked.step()
        step += 1
        assert step < 20_000
    checked.assert_tokens_right()
    for request_id, outcome in checked.requests.items():
        assert outcome.finish_reason is not None, f"{request_id} did not end"
        assert outcome.finish_reason is not FinishReason.ERROR


@both_modes
@pytest.mark.parametrize("culprit", [0, 6, 15])
def test_a_poisonous_request_ends_alone(culprit: int, is_async: bool) -> None:
    checked = make({"kind": "raise", "token": POISON}, is_async=is_async)
    for i in range(16):
        prompt = prompt_of(i)
        if i == culprit:
            prompt[10] = POISON
        checked.add(str(i), prompt, max_tokens=12)
    checked.run()
    checked.assert_tokens_right()
    reasons = {request_id: outcome.finish_reason for request_id, outcome in checked.requests.items()}
    assert reasons.pop(str(culprit)) is FinishReason.ERROR
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert checked.core.num_restarts <= 4 + 3


@both_modes
def test_a_request_that_turns_poisonous_while_it_decodes_ends_alone(is_async: bool) -> None:
    checked = make(is_async=is_async)
    checked.add("probe", prompt_of(3), max_tokens=12)
    checked.run()
    turning_point = checked.requests["probe"].tokens[7]

    checked = make({"kind": "raise", "token": turning_point}, is_async=is_async)
    for i in range(8):
        checked.add(str(i), prompt_of(i), max_tokens=12)
    checked.run()
    checked.assert_tokens_right()
    failed = [i for i, outcome in checked.requests.items() if outcome.finish_reason is FinishReason.ERROR]
    assert failed == ["3"]
    assert len(checked.requests["3"].tokens) == 8  # what it had is delivered


def test_the_error_of_a_poisonous_request_is_the_workers() -> None:
    checked = make({"kind": "raise", "token": POISON})
    checked.add("bad", [POISON] * 3)
    outputs: dict[str, Any] = {}
    while not outputs:
        outputs = checked.step()
    error = outputs["bad"].error
    assert error is not None
    assert error.code == "worker_error"
    assert not error.retryable
    assert "ordered to raise in execute_model" in error.message
    assert "rank 0" in error.message


def test_requests_that_arrive_during_the_search_wait_and_are_served() -> None:
    checked = make({"kind": "raise", "token": POISON})
    for i in range(8):
        checked.add(str(i), [POISON] if i == 5 else prompt_of(i))
    while checked.core.recovery.allowed is None:
        checked.step()
    checked.add("late", prompt_of(99))
    checked.step()
    checked.step()
    assert checked.requests["late"].tokens == []
    checked.run()
    checked.assert_tokens_right()
    assert len(checked.requests["late"].tokens) == 16


def test_suspects_may_be_aborted_during_the_search() -> None:
    checked = make({"kind": "raise", "token": POISON})
    for i in range(8):
        checked.add(str(i), [POISON] if i == 5 else prompt_of(i))
    while checked.core.recovery.allowed is None:
        checked.step()
    checked.abort(*checked.core.recovery.allowed)
    checked.abort("5")
    checked.run()
    checked.assert_tokens_right()
    assert not checked.core.recovery.is_watching


@both_modes
def test_failures_amid_constant_preemption_lose_no_token(is_async: bool) -> None:
    checked = make(
        *({"kind": "raise", "step": step} for step in range(10, 200, 17)),
        is_async=is_async,
        num_gpu_blocks_override=24,
        max_model_len=300,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_worker_restarts=100,
    )
    for i in range(20):
        checked.add(str(i), prompt_of(i, 10 + 7 * i), max_tokens=100)
    checked.run()
    checked.assert_tokens_right()
    assert all(len(outcome.tokens) == 100 for outcome in checked.requests.values())


@both_modes
def test_what_ran_goes_on_after_a_failure_during_a_pause_for_new_requests(is_async: bool) -> None:
    checked = make({"kind": "raise", "step": 5}, is_async=is_async)
    checked.add("ran", prompt_of(1))
    for _ in range(3):
        checked.step()
    checked.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    checked.add("new", prompt_of(2))
    checked.run()
    assert len(checked.requests["ran"].tokens) == 16
    assert checked.requests["new"].tokens == []
    checked.scheduler.set_pause_state(PauseState.UNPAUSED)
    checked.run()
    checked.assert_tokens_right()


def test_ranks_that_do_not_come_up_at_first_are_started_again(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    checked = make({"kind": "raise", "step": 3}, {"kind": "raise", "at": "load_model", "once": str(once)})
    once.unlink()  # the first start was not to fail, the second is
    checked.add("a", prompt_of(1))
    checked.run()
    checked.assert_tokens_right()
    assert once.exists()
    assert checked.core.num_restarts == 1


def test_too_many_failures_end_the_engine_with_their_history() -> None:
    checked = make(*({"kind": "raise", "step": step} for step in (3, 20, 40, 60)), max_worker_restarts=3)
    checked.add("a", prompt_of(1), max_tokens=80)
    checked.add("b", prompt_of(2), max_tokens=80)
    with pytest.raises(RestartsExhausted) as caught:
        checked.run()
    assert str(caught.value).startswith("worker rank 0 (pid ")
    assert "execute_model of step 60" in str(caught.value)
    steps = [text.partition(":")[0].rpartition(" ")[2] for _, text in caught.value.history]
    assert steps == ["3", "20", "40"]


@pytest.mark.parametrize("fields", [{"on_worker_failure": "fail"}, {"max_worker_restarts": 0}])
def test_without_restarts_the_first_failure_is_the_end(fields: dict[str, Any]) -> None:
    checked = make({"kind": "raise", "step": 2}, **fields)
    checked.add("a", prompt_of(1))
    with pytest.raises(WorkerFailed, match="ordered to raise in execute_model"):
        checked.run()


def test_workers_with_new_weights_are_not_replaced_by_ones_with_the_old() -> None:
    checked = make({"kind": "raise", "step": 2})
    checked.core.executor._lasting_calls.record("update_weights", (), {"update_info": {}})  # not the mock's
    checked.add("a", prompt_of(1))
    with pytest.raises(RestartImpossible, match="update_weights has changed them"):
        checked.run()


def test_a_failure_is_found_while_nothing_runs() -> None:
    checked = make()
    executor = checked.core.executor
    executor.collective_rpc("inject", args=({"kind": "raise"},))
    checked.add("a", prompt_of(1))
    checked.step()
    assert checked.core.check_workers() == {}
    checked.run()
    checked.assert_tokens_right()


def test_worker_that_has_less_memory_than_before_does_not_take_over() -> None:
    checked = make({"kind": "raise", "step": 2}, max_worker_restarts=2)
    with pytest.raises(RestartsExhausted) as caught:
        checked.core.executor.config.worker_options["mock_num_blocks"] = 400
        checked.add("a", prompt_of(1))
        checked.run()
    assert isinstance(caught.value.cause, WorkerStartFailed)
    assert "room for 400 blocks, it had 500 before" in str(caught.value)
