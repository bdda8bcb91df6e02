"""Three questions about an engine, answered from its state page."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine_core.health import Verdict, live, progress, ready
from transport.state_page import StatePage

NOW = 1000.0


@pytest.fixture
def page() -> Iterator[StatePage]:
    """Of an engine of two ranks in this process that is idle and well."""
    with StatePage.create(num_ranks=2) as page:
        page.engine.claim()
        page.engine.heartbeat_s = NOW - 0.5
        page.engine.phase = "ready"
        for rank in (0, 1):
            page.rank(rank).claim()
            page.rank(rank).enter("waiting", NOW - 100)
        step(page)
        yield page


def step(
    page: StatePage, *, at: float = NOW - 1, in_flight: int = 0, running: int = 0, waiting: int = 0
) -> None:
    page.engine.progress(
        step_id=12,
        last_progress_s=at,
        in_flight=in_flight,
        running=running,
        waiting=0,
        deferred=0,
        requests_admitted=5,
        requests_finished=0,
        blocks_free=0,
        blocks_used=0,
        blocks_cached=0,
        prefix_requests=0,
        prefix_queries=0,
        prefix_hits=0,
        prompt_tokens=0,
        cached_tokens=0,
        generation_tokens=0,
        preemptions=0,
    )


def test_an_idle_engine_is_live_ready_and_gets_on(page: StatePage) -> None:
    for question in (live, ready, progress):
        verdict = question(page.snapshot(), NOW)
        assert verdict.ok, verdict.reason
    assert progress(page.snapshot(), NOW).reason == "nothing to do"


def test_an_engine_that_has_not_begun_is_not_live() -> None:
    with StatePage.create(num_ranks=1) as page:
        assert live(page.snapshot(), NOW).reason == "the engine has not begun to start"


def test_a_starting_engine_is_live_and_gets_on_but_is_not_ready(page: StatePage) -> None:
    page.engine.phase = "starting workers"
    assert live(page.snapshot(), NOW).ok
    assert progress(page.snapshot(), NOW).ok
    assert ready(page.snapshot(), NOW).reason == "the engine is starting workers"


def test_an_engine_whose_process_has_ended_is_not_live_and_tells_the_first_error(page: StatePage) -> None:
    page.engine.start_ticks = 1  # a process of that pid that started then is long gone
    page.engine.first_error = "rank 1 was killed by SIGKILL"
    page.engine.phase = "failed"
    for question in (live, ready):
        assert question(page.snapshot(), NOW).reason == (
            f"the engine process {os.getpid()} has ended: rank 1 was killed by SIGKILL"
        )
    page.engine.phase = "ready"  # the ranks were restarted then; of this death nothing was written
    assert "(before, it had got over: rank 1 was killed by SIGKILL)" in live(page.snapshot(), NOW).reason


@pytest.mark.parametrize("phase", ["failed", "stopped"])
def test_an_engine_that_failed_or_stopped_is_neither_live_nor_ready(page: StatePage, phase: str) -> None:
    page.engine.phase = phase
    for question in (live, ready, progress):
        assert question(page.snapshot(), NOW).reason == f"the engine has {phase}"


def test_an_engine_without_heartbeat_is_not_live(page: StatePage) -> None:
    page.engine.heartbeat_s = NOW - 42
    assert "no sign of life for 42 s" in live(page.snapshot(), NOW).reason
    assert live(page.snapshot(), NOW, heartbeat_limit_s=60).ok


def test_a_paused_sleeping_or_updating_engine_is_live_but_not_ready(page: StatePage) -> None:
    engine = page.engine
    engine.kv_status = "CLEARED"
    assert ready(page.snapshot(), NOW).reason == "the KV cache cannot be used (CLEARED): wake it up"
    engine.weight_status = "UPDATING"
    assert ready(page.snapshot(), NOW).reason == "the weights cannot be used (UPDATING)"
    engine.pause = "frozen"
    assert ready(page.snapshot(), NOW).reason == "the scheduler is paused (frozen): resume it"
    engine.sleep_level = 2
    assert ready(page.snapshot(), NOW).reason == "the engine sleeps at level 2: wake it up"
    assert live(page.snapshot(), NOW).ok


def test_a_long_step_is_progress_until_the_limit(page: StatePage) -> None:
    page.engine.awake_since_s = NOW - 100
    step(page, at=NOW - 29, in_flight=1, running=3)
    assert progress(page.snapshot(), NOW).reason == "at step 12, 29.0 s ago"
    assert not progress(page.snapshot(), NOW, stall_limit_s=28).ok


def test_a_stuck_rank_is_named_with_its_call_and_age(page: StatePage) -> None:
    page.engine.awake_since_s = NOW - 100
    step(page, at=NOW - 40, in_flight=2, running=3)
    page.rank(1).begin_step(1, 12, NOW - 39)
    assert progress(page.snapshot(), NOW).reason == (
        "2 step(s) up to 12 are with the ranks and nothing came back for 40 s: "
        f"rank 1 (pid {os.getpid()}) is in execute_model for 39 s"
    )


def test_a_dead_rank_is_named(page: StatePage) -> None:
    page.engine.awake_since_s = NOW - 100
    step(page, at=NOW - 40, in_flight=1, running=3)
    page.rank(0).start_ticks = 1
    assert f"rank 0 (pid {os.getpid()}) has ended" in progress(page.snapshot(), NOW).reason


def test_a_lost_answer_is_told_from_a_stuck_rank(page: StatePage) -> None:
    page.engine.awake_since_s = NOW - 100
    step(page, at=NOW - 40, in_flight=1, running=3)
    assert progress(page.snapshot(), NOW).reason.endswith("all ranks wait for a call")


def test_a_main_loop_that_is_stuck_outside_a_step_is_noticed(page: StatePage) -> None:
    """In a call of all ranks, for example, after it had been idle for long."""
    step(page, at=NOW - 4000, running=2)
    page.engine.awake_since_s = NOW - 31
    page.rank(1).begin(1, "update_weights", NOW - 31)
    assert progress(page.snapshot(), NOW).reason == (
        f"the main loop of process {os.getpid()} has not gone round for 31 s, with 2 requests running and "
        f"0 waiting: rank 1 (pid {os.getpid()}) is in update_weights for 31 s"
    )


def test_a_loop_that_waits_for_work_is_not_stuck_whatever_it_holds(page: StatePage) -> None:
    """A frozen scheduler has requests and nothing to do."""
    step(page, at=NOW - 400, running=3)
    page.engine.pause = "frozen"
    assert progress(page.snapshot(), NOW) == Verdict(True, "3 request(s) wait, and it is paused: resume it")
    page.engine.sleep_level = 1
    assert progress(page.snapshot(), NOW) == Verdict(True, "3 request(s) wait, and it is asleep: wake it up")
