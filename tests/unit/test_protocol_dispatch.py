"""Frames in, frames out: the engine behind its boundary, without a socket or a process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.protocol import FinishReason
from tests.engines import expected, prompt
from tests.fake_frontend import ABORT, ADD, UTILITY, encode
from tests.protocol_engine import Engine


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_requests_of_several_clients_come_back_to_each(async_scheduling: bool) -> None:
    engine = Engine(async_scheduling=async_scheduling)
    for client in range(3):
        engine.add(f"r{client}", prompt(client, 20), client)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.core.has_work:
        for client, message in engine.step():
            for output in message.outputs:
                assert output.request_id == f"r{client}"
                seen[client] += output.new_token_ids
    assert seen == {client: expected(prompt(client, 20), 4) for client in range(3)}


def test_api_servers_name_themselves_within_their_front_end() -> None:
    engine = Engine()
    request: list[Any] = ["a", [1, 2], None, {"max_tokens": 1}, None, 1.0, None, None, None, None, None, 2]
    engine.receive([ADD, encode(request)], client=5, group=range(4, 8))
    request[0], request[11] = "b", 4
    engine.receive([ADD, encode(request)], client=5, group=range(4, 8))
    ((client, message),) = engine.sent()
    assert client == 5 and message.outputs[0].request_id == "b"
    assert message.outputs[0].error is not None and "client_index 4" in message.outputs[0].error.message
    clients = set()
    while engine.core.has_work:
        clients |= {(client, o.request_id) for client, message in engine.step() for o in message.outputs}
    assert clients == {(6, "a")}


def test_error_without_a_readable_id_is_dropped_and_one_with_it_is_answered() -> None:
    engine = Engine()
    engine.receive([ADD, b"\xc1"])
    engine.receive([ADD])
    assert engine.sent() == []
    engine.add("x", "not tokens", client=1)
    ((client, message),) = engine.sent()
    (output,) = message.outputs
    assert client == 1 and output.finish_code is FinishReason.ERROR
    assert output.error is not None and output.error.code == "validation_error"
    assert message.finished_requests == ["x"]


def test_no_request_is_taken_while_closing() -> None:
    engine = Engine()
    engine.dispatcher.closing = True
    engine.add("x", [1])
    engine.call("is_sleeping")
    (_, refused), (_, answer) = engine.sent()
    assert refused.outputs[0].finish_code is FinishReason.ABORT
    assert answer.utility_output is not None
    assert answer.utility_output.failure_message == "Server shutting down"


def test_paused_engine_answers_after_it_has_run_dry() -> None:
    engine = Engine()
    engine.add("x", prompt(1, 10), max_tokens=30)
    engine.step()
    engine.call("pause_generation", "wait", True)
    tokens, answered = 0, False
    while engine.core.has_work:
        for _, message in engine.step():
            assert not answered
            answered = message.utility_output is not None
            tokens += sum(len(output.new_token_ids) for output in message.outputs)
    assert answered and tokens == 30
    engine.call("resume_scheduler")
    engine.call("is_scheduler_paused")
    assert [m.utility_output.result for _, m in engine.sent() if m.utility_output] == [
        (None, None),
        (None, False),
    ]


def test_aborting_a_client_ends_its_requests_alone() -> None:
    engine = Engine()
    for i in range(4):
        engine.add(f"{i}", prompt(i, 20), client=i % 2)
    engine.step()
    assert engine.dispatcher.abort_client(1) == 2
    tokens = engine.run()
    assert {request_id for request_id, seen in tokens.items() if len(seen) >= 3} == {"0", "2"}


def test_result_that_cannot_be_sent_is_a_failure() -> None:
    engine = Engine()
    engine.dispatcher.control.weights.version = object()  # type: ignore[assignment]
    engine.call("get_weight_version")
    engine.dispatcher.control.weights.version = "default"
    ((_, answer),) = engine.sent()
    assert answer.utility_output is not None and answer.utility_output.failure_message is not None
    assert "cannot be sent" in answer.utility_output.failure_message


def test_sleep_and_wake_reach_the_worker_and_pause() -> None:
    engine = Engine(worker_cls="tests.sleepy_worker:SleepyWorker", enable_sleep_mode=True)

    def called(method: str, *args: Any) -> Any:
        engine.call(method, *args)
        engine.run()
        (answer,) = [m.utility_output for _, m in engine.sent() if m.utility_output]
        assert answer.failure_message is None, answer.failure_message
        assert answer.result is not None
        return answer.result[1]

    assert called("sleep", 1, "abort") is None
    assert called("is_sleeping") is True
    assert called("collective_rpc", "history") == [["sleep 1"]]
    assert called("wake_up", ["weights"]) is False
    assert called("wake_up", ["kv_cache"]) is True
    assert called("is_sleeping") is False
    assert called("sleep", 0, "keep") is None
    assert called("wake_up", ["scheduling"]) is True
    assert called("collective_rpc", "history") == [["sleep 1", "wake_up ['weights']", "wake_up ['kv_cache']"]]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.binary(max_size=2), st.lists(st.binary(max_size=40), max_size=3)), max_size=10))
def test_no_frames_stop_the_engine(messages: list[tuple[bytes, list[bytes]]]) -> None:
    engine = ENGINE
    for kind, payload in messages:
        engine.receive([kind, *payload])
    engine.add("probe", [5, 6, 7])
    assert engine.run()["probe"] == expected([5, 6, 7], 4)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5),
            st.lists(st.integers(-1, 40000), max_size=5), st.dictionaries(st.text(max_size=9), st.integers()),
        ),
        max_size=24,
    )
)  # fmt: skip
def test_no_fields_stop_the_engine(fields: list[Any]) -> None:
    engine = ENGINE
    for kind in (ADD, ABORT, UTILITY):
        try:
            payload = encode(fields)
        except OverflowError:
            return
        engine.receive([kind, payload])
    engine.call("resume_scheduler")
    engine.add("probe", [5, 6, 7])
    assert engine.run()["probe"] == expected([5, 6, 7], 4)


ENGINE = Engine()
