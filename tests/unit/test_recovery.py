"""Restarts are limited, and a request that makes the ranks fail is found without harm to others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.recovery import Recovery, RestartsExhausted, is_own_doing
from executor.errors import ExecutorError, WorkerFailed, WorkerStartFailed, WorkerTimeout

RAISED = WorkerFailed(0, 10, "execute_model", 5, message="ValueError: no")
KILLED = WorkerFailed(1, 11, "execute_model", 5, exit_code=-9)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def make(max_restarts: int = 3, window_s: float = 60.0) -> tuple[Recovery, FakeClock]:
    clock = FakeClock()
    return Recovery(max_restarts, window_s, clock), clock


class Engine:
    """Runs requests in batches of at most `seats`; each step gives everybody in it a token, unless it fails.

    `fails(batch)` is asked for each step and returns how it fails, or None.
    """

    def __init__(
        self,
        recovery: Recovery,
        requests: dict[str, int],
        fails: Callable[[list[str]], ExecutorError | None],
        seats: int = 1000,
    ) -> None:
        self.recovery = recovery
        self.left = dict(requests)  # tokens to make
        self.known = dict.fromkeys(requests, 1)
        self.fails = fails
        self.seats = seats
        self.convicted: list[str] = []
        self.failures = 0
        self.tokens = 0

    def run(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.left:
                return
            self.step()
        raise AssertionError(f"no end: {self.left}")

    def step(self) -> None:
        allowed = self.recovery.allowed
        batch = [r for r in self.left if allowed is None or r in allowed][: self.seats]
        cause = self.fails(batch) if batch else None
        if cause is not None:
            self.failures += 1
            suspects = {request: self.known[request] for request in batch}
            restart = self.recovery.failed(cause, suspects, self.tokens)
            self.recovery.restarted()
            if restart.convicted is not None:
                self.convicted.append(restart.convicted)
                del self.left[restart.convicted]
        else:
            self.tokens += len(batch)
            for request in batch:
                self.known[request] += 1
                self.left[request] -= 1
                if not self.left[request]:
                    del self.left[request]
        if self.recovery.is_watching:
            observed = self.recovery.observed
            self.recovery.observe({r: self.known[r] for r in self.left if r in observed})


def fails_with(*poison: str, cause: ExecutorError = RAISED) -> Callable[[list[str]], ExecutorError | None]:
    return lambda batch: cause if set(poison) & set(batch) else None


def test_an_orderly_failure_that_does_not_repeat_costs_one_restart_and_no_request() -> None:
    recovery, _ = make()
    causes = iter([RAISED])
    engine = Engine(recovery, {"a": 5, "b": 5}, lambda batch: next(causes, None))
    engine.run()
    assert engine.failures == 1
    assert engine.convicted == []
    assert not recovery.is_watching


def test_a_lone_request_is_not_convicted_by_its_first_failure() -> None:
    recovery, _ = make()
    causes = iter([RAISED])
    engine = Engine(recovery, {"a": 5}, lambda batch: next(causes, None))
    engine.run()
    assert engine.convicted == []


def test_a_lone_request_that_fails_again_is_convicted() -> None:
    recovery, _ = make()
    engine = Engine(recovery, {"a": 5}, fails_with("a"))
    engine.run()
    assert engine.convicted == ["a"]
    assert engine.failures == 2


@pytest.mark.parametrize("culprit", [0, 1, 77, 254, 255])
def test_one_culprit_among_256_is_found_in_eleven_failures(culprit: int) -> None:
    recovery, _ = make(max_restarts=1)
    engine = Engine(recovery, {str(i): 3 for i in range(256)}, fails_with(str(culprit)))
    engine.run()
    assert engine.convicted == [str(culprit)]
    assert engine.failures <= 11


def test_innocent_requests_run_one_group_at_a_time_while_a_culprit_is_sought() -> None:
    recovery, _ = make()
    recovery.failed(RAISED, {"a": 1, "b": 1, "c": 1}, 0)
    assert recovery.allowed == {"a", "b"}
    assert not recovery.observe({"a": 2, "b": 1})
    assert recovery.observe({"a": 3, "b": 2})
    assert recovery.allowed == {"c"}
    assert recovery.observe({})  # it ended
    assert recovery.allowed is None
    assert not recovery.is_watching


def test_only_the_part_of_a_group_that_was_in_the_failing_step_is_suspected_further() -> None:
    recovery, _ = make()
    recovery.failed(RAISED, {"a": 1, "b": 1, "c": 1, "d": 1}, 0)
    assert recovery.allowed == {"a", "b"}
    recovery.failed(RAISED, {"a": 1}, 0)  # b was not in that step
    assert recovery.allowed == {"a"}
    assert recovery.failed(RAISED, {"a": 1}, 0).convicted == "a"
    assert recovery.allowed == {"b"}


def test_a_death_by_signal_holds_nobody_back() -> None:
    recovery, _ = make()
    assert recovery.failed(KILLED, {"a": 1, "b": 1}, 0).convicted is None
    assert recovery.allowed is None
    assert recovery.observed == {"a", "b"}
    recovery.observe({"a": 2, "b": 2})
    assert not recovery.is_watching


def test_deaths_by_signal_with_progress_between_suspect_nobody() -> None:
    recovery, _ = make(max_restarts=100)
    for n in range(1, 20):
        recovery.failed(KILLED, {"a": n}, n)
        assert recovery.allowed is None
        recovery.observe({"a": n + 1})


def test_a_request_that_kills_its_worker_is_found() -> None:
    recovery, _ = make(max_restarts=3)
    crash = WorkerFailed(0, 10, "execute_model", 5, exit_code=-11)
    engine = Engine(recovery, {str(i): 3 for i in range(64)}, fails_with("13", cause=crash))
    engine.run()
    assert engine.convicted == ["13"]
    assert engine.failures <= 2 + 2 * 6 + 4


def test_kills_from_outside_during_the_search_mislead_nobody() -> None:
    recovery, _ = make(max_restarts=30)
    kills = iter([False, True, False] * 12)

    def fails(batch: list[str]) -> ExecutorError | None:
        if next(kills, False):
            return KILLED
        return RAISED if "3" in batch else None

    engine = Engine(recovery, {str(i): 4 for i in range(8)}, fails)
    engine.run()
    assert engine.convicted == ["3"]


def test_several_culprits_in_one_step_are_all_found_if_the_workers_work_otherwise() -> None:
    recovery, _ = make(max_restarts=3)
    poison = ["3", "4", "40", "60"]
    engine = Engine(recovery, {str(i): 3 for i in range(64)}, fails_with(*poison))
    engine.run()
    assert sorted(engine.convicted) == sorted(poison)


def test_culprits_cost_no_restarts_while_the_workers_work() -> None:
    recovery, _ = make(max_restarts=1)
    for round_ in range(50):
        engine = Engine(recovery, {f"{round_}-{i}": 2 for i in range(4)}, fails_with(f"{round_}-2"))
        engine.tokens = 1000 * (round_ + 1)  # others were served in between
        engine.run()
        assert engine.convicted == [f"{round_}-2"]


def test_workers_that_fail_whatever_they_are_given_end_the_engine() -> None:
    recovery, _ = make(max_restarts=3)
    engine = Engine(recovery, {str(i): 3 for i in range(256)}, lambda batch: RAISED)
    with pytest.raises(RestartsExhausted) as caught:
        engine.run()
    assert len(engine.convicted) <= 4
    assert str(caught.value).startswith(str(RAISED))


def test_restarts_are_limited_within_the_window() -> None:
    recovery, clock = make(max_restarts=2, window_s=10.0)
    recovery.failed(KILLED, {}, 0)
    clock.now += 6
    recovery.failed(KILLED, {}, 0)
    clock.now += 5  # the first is forgotten
    recovery.failed(KILLED, {}, 0)
    with pytest.raises(RestartsExhausted) as caught:
        recovery.failed(RAISED, {}, 0)
    error = caught.value
    assert error.cause is RAISED
    assert [age for age, _ in error.history] == [5.0, 0.0]
    assert "not restarted more than 2 times within 10 s" in str(error)
    assert "5.0 s earlier: worker rank 1 (pid 11) was killed by SIGKILL" in error.report()


def test_no_restarts_allowed_means_that_the_first_failure_is_the_end() -> None:
    recovery, _ = make(max_restarts=0)
    with pytest.raises(RestartsExhausted) as caught:
        recovery.failed(KILLED, {"a": 1}, 0)
    assert caught.value.cause is KILLED


def test_starts_that_fail_are_counted_and_tried_again_ever_later() -> None:
    recovery, _ = make(max_restarts=6)
    recovery.failed(KILLED, {}, 0)
    failed = WorkerStartFailed(0, 5, "load", "OSError: busy")
    assert [recovery.start_failed(failed).after_s for _ in range(3)] == [0.25, 0.5, 1.0]
    recovery.restarted()
    assert recovery.start_failed(failed).after_s == 0.25
    recovery.failed(KILLED, {}, 0)
    with pytest.raises(RestartsExhausted):
        recovery.start_failed(failed)


@pytest.mark.parametrize(
    ("cause", "own"),
    [
        (RAISED, True),
        (WorkerFailed(0, 1, "execute_model", 1, exit_code=3), True),
        (KILLED, False),
        (WorkerFailed(0, 1, "execute_model", 1, exit_code=-11), False),
        (WorkerTimeout(0, 1, "execute_model", 1), True),
        (WorkerTimeout(0, 1, "execute_model", 1, state="D (waiting for a device)"), True),
        (WorkerTimeout(0, 1, "execute_model", 1, state="T (stopped)"), False),
    ],
)
def test_what_was_done_to_a_process_is_told_from_what_it_did(cause: ExecutorError, own: bool) -> None:
    assert is_own_doing(cause) is own


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(1, 6), min_size=n, max_size=n),
            st.sets(st.integers(0, n - 1), max_size=3),
            st.integers(1, 12),
            st.lists(st.booleans(), max_size=30),
        )
    )
)
def test_exactly_the_culprits_end_whatever_the_batch(
    case: tuple[list[int], set[int], int, list[bool]],
) -> None:
    """With transient failures in between, too, as long as none hits a request alone twice in a row."""
    lengths, poison, seats, transients = case
    recovery, _ = make(max_restarts=10_000)
    names = {str(i) for i in poison}
    transient = iter(transients)
    hit_alone: str | None = None

    def fails(batch: list[str]) -> ExecutorError | None:
        nonlocal hit_alone
        if names & set(batch):
            return RAISED
        if batch != [hit_alone] and next(transient, False):
            hit_alone = batch[0] if len(batch) == 1 else None
            return RAISED
        hit_alone = None
        return None

    engine = Engine(recovery, {str(i): n for i, n in enumerate(lengths)}, fails, seats)
    engine.run()
    assert set(engine.convicted) == names
    assert engine.failures <= (len(names) + sum(transients)) * (2 * math.log2(len(lengths) + 1) + 4)
