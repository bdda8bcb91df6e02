"""Calls that wait for the engine to run dry, and what overtakes them."""

from __future__ import annotations

from typing import Any

from tests.engines import prompt
from tests.protocol_engine import Engine

UPDATE = ("update_weights", "v1", None, None, {"value": 1})
OVERTAKEN = "requests go on before it was done"


def busy_engine(**config: Any) -> Engine:
    worker_cls = "tests.weighted_worker:WeightedWorker"
    engine = Engine(worker_cls=worker_cls, enable_sleep_mode=True, **config)
    engine.add("x", prompt(1, 10), max_tokens=30)
    engine.step()
    return engine


def answers(engine: Engine, *calls: tuple[Any, ...]) -> list[str | None]:
    """Make the calls before the next step. What each is answered, as they come: a failure, or None."""
    for method, *args in calls:
        engine.call(method, *args)
    outcomes = engine.sent()
    while engine.core.has_work:
        outcomes += engine.step()
    return [message.utility_output.failure_message for _, message in outcomes if message.utility_output]


def state(engine: Engine) -> tuple[bool, bool]:
    """Paused, asleep."""
    control = engine.dispatcher.control
    return control.is_scheduler_paused(), bool(control._asleep)


def test_an_update_does_not_wake_what_was_put_to_sleep_after_it() -> None:
    engine = busy_engine()
    assert answers(engine, UPDATE, ("sleep", 1, "keep")) == [None, None]
    assert state(engine) == (True, True)


def test_an_update_of_weights_that_were_put_to_sleep_before_it_fails() -> None:
    engine = busy_engine()
    slept, updated = answers(engine, ("sleep", 1, "keep"), UPDATE)
    assert slept is None and updated is not None and "the weights were put to sleep before" in updated
    assert state(engine) == (True, True)


def test_two_updates_at_once_are_both_made_and_requests_go_on() -> None:
    engine = busy_engine()
    assert answers(engine, UPDATE, UPDATE) == [None, None]
    assert state(engine) == (False, False)


def test_an_update_leaves_a_pause_that_was_asked_for_meanwhile() -> None:
    engine = busy_engine()
    assert answers(engine, UPDATE, ("pause_scheduler", "keep"), UPDATE) == [None, None, None]
    assert state(engine) == (True, False)


def test_what_is_not_done_when_requests_go_on_fails() -> None:
    for going_on in ("resume_scheduler", "wake_up"):
        for call in (("sleep", 1, "wait"), ("pause_scheduler", "wait"), (*UPDATE, "wait"), ("drain",)):
            engine = busy_engine()
            overtaken, gone_on = answers(engine, call, (going_on,))
            assert overtaken is not None and OVERTAKEN in overtaken, call
            assert gone_on is None and state(engine) == (False, False)


def test_requests_do_not_go_on_while_workers_sleep() -> None:
    engine = busy_engine()
    assert answers(engine, ("sleep", 1, "abort")) == [None]
    (refusal,) = answers(engine, ("resume_scheduler",))
    assert refusal is not None and "kv_cache and weights are asleep: wake them up" in refusal
    assert state(engine) == (True, True)
    assert answers(engine, ("wake_up",)) == [None] and state(engine) == (False, False)


def test_a_drain_is_done_when_no_frozen_request_is_left() -> None:
    engine = busy_engine()
    assert answers(engine, ("drain",), ("pause_scheduler", "keep")) == [None]  # the pause
    assert engine.core.scheduler.requests
    assert answers(engine, ("abort_requests", ["x"])) == [None, None]  # the drain's, too
    assert not engine.core.scheduler.requests


def test_a_call_that_leaves_nothing_to_do_answers_those_that_wait_for_that() -> None:
    engine = busy_engine(async_scheduling=False)
    assert answers(engine, ("sleep", 1, "wait"), ("pause_scheduler", "keep")) == [None, None]
    assert state(engine) == (True, True)


def test_limits_are_those_of_the_start_where_it_plans_less_than_it_may_batch() -> None:
    engine = Engine(max_num_batched_tokens=2048, max_num_scheduled_tokens=128, max_num_seqs=256)
    assert answers(engine, ("set_limits",), ("set_limits", 200), ("set_limits", None, 128)) == [None] * 3
    (refusal,) = answers(engine, ("set_limits", None, 2048))
    assert refusal is not None and "max_num_batched_tokens = 2048 is not from 128 to 128" in refusal
