"""Steering engines of real processes: pauses, sleep, weights, limits, adapters, deadlines, barriers."""

from __future__ import annotations

import pstats
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.client import EngineClient
from engine_core.errors import RequestError, UtilityError
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest
from tests.engines import VOCAB, expected, mock_config, prompt, wait_until
from tests.weighted_worker import weighted_tokens
from transport.state_page import StatePage

WEIGHTED = "tests.weighted_worker:WeightedWorker"


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineClient]:
    config = mock_config(
        worker_cls=WEIGHTED,
        tensor_parallel_size=2,
        step_ms=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_lora=True,
        max_loras=1,
        enable_sleep_mode=True,
    )
    with EngineClient.launch(config) as client:
        yield client


@pytest.fixture
def engine(shared: EngineClient) -> Iterator[EngineClient]:
    """Awake, running, with weight 0."""
    yield shared
    shared.wake_up()
    shared.resume_generation()
    shared.set_limits(max_num_seqs=8, max_num_batched_tokens=64)
    if shared.collective_rpc("get_weight") != [0, 0]:
        shared.update_weights("default", options={"value": 0})
    shared.utility("set_weight_version", "default")


def page(client: EngineClient) -> dict[str, Any]:
    with StatePage.open(client.engine_pid) as view:
        row: dict[str, Any] = view.snapshot()["engine"]
        return row


def tokens_of(client: EngineClient, tokens: list[int], count: int) -> list[int]:
    return [
        token
        for output in client.generate(tokens, SamplingParams(max_tokens=count))
        for token in output.new_token_ids
    ]


def receive_all(client: EngineClient, timeout_s: float = 20.0) -> dict[str, list[Any]]:
    """Outputs of everything that is live, by request."""
    found: dict[str, list[Any]] = {}
    deadline = time.monotonic() + timeout_s
    while (outputs := client.outputs(0.1)) or client.num_live:
        assert time.monotonic() < deadline
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
    return found


def test_a_pause_shows_in_the_page_and_refuses_until_resume(engine: EngineClient) -> None:
    assert engine.is_paused() is False
    assert engine.pause_generation() is None
    assert engine.is_paused() is True
    assert page(engine)["pause"] == "no new requests"
    with pytest.raises(RequestError) as refused:
        tokens_of(engine, [1, 2], 3)
    assert (refused.value.code, refused.value.retryable) == ("engine_paused", True)
    engine.resume_generation()
    assert page(engine)["pause"] == "running"
    assert tokens_of(engine, [1, 2], 3) == expected([1, 2], 3)


def test_a_drain_lets_everything_end_and_takes_nothing_new(engine: EngineClient) -> None:
    for i in range(12):  # more than run at the same time
        engine.add_request(prompt(i, 10), SamplingParams(max_tokens=20))
    engine.drain()
    wait_until(lambda: page(engine)["requests_finished"] == page(engine)["requests_admitted"], "all done")
    outputs = receive_all(engine)
    assert [parts[-1].finish_reason for parts in outputs.values()] == ["length"] * 12
    assert page(engine)["phase"] == "draining"
    with pytest.raises(RequestError) as refused:
        tokens_of(engine, [1], 1)
    assert (refused.value.code, refused.value.retryable) == ("engine_draining", True)
    engine.resume_generation()
    assert page(engine)["phase"] == "ready"
    assert tokens_of(engine, [1, 2], 3) == expected([1, 2], 3)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_drops_the_cache_and_waking_up_brings_everything_back(engine: EngineClient, level: int) -> None:
    tokens = prompt(3, 64)
    assert tokens_of(engine, tokens, 5) == expected(tokens, 5)
    assert engine.sleep(level) is None
    row = page(engine)
    assert (row["sleep_level"], row["kv_status"], row["weight_status"]) == (level, "CLEARED", "CLEARED")
    assert row["blocks_cached"] == 0
    assert engine.is_sleeping() is True
    assert engine.wake_up(["weights"]) is False
    assert page(engine)["weight_status"] == "NORMAL"
    assert engine.wake_up(["kv_cache"]) is True
    row = page(engine)
    assert (row["sleep_level"], row["kv_status"], row["pause"]) == (0, "NORMAL", "running")
    assert tokens_of(engine, tokens, 5) == expected(tokens, 5)


def test_the_kv_cache_alone_is_released_after_a_pause_and_kept_requests_are_computed_anew(
    engine: EngineClient,
) -> None:
    with pytest.raises(UtilityError, match="needs a completed pause"):
        engine.release_kv_cache_memory()
    tokens = prompt(4, 40)
    request_id = engine.add_request(tokens, SamplingParams(max_tokens=60))
    first = engine.outputs()
    engine.pause_generation("keep")
    engine.release_kv_cache_memory()
    assert page(engine)["kv_status"] == "CLEARED"
    assert engine.wake_up(["kv_cache"]) is True
    outputs = [*first, *receive_all(engine)[request_id]]
    assert [token for output in outputs for token in output.new_token_ids] == expected(tokens, 60)


def test_weights_are_updated_between_two_tokens_and_outputs_say_which_they_come_from(
    engine: EngineClient,
) -> None:
    tokens = prompt(5, 20)
    request_id = engine.add_request(tokens, SamplingParams(max_tokens=200))
    outputs = engine.outputs()
    assert engine.update_weights("v2", tensors={"weight": np.array([1000, 0, 0])}) is None
    assert engine.get_weight_version() == "v2"
    row = page(engine)
    assert (row["weight_version"], row["weight_status"], row["pause"]) == ("v2", "NORMAL", "running")
    outputs += receive_all(engine)[request_id]
    versions = [output.weight_version for output in outputs]
    assert versions == sorted(versions) and set(versions) == {"default", "v2"}
    before = [t for output in outputs if output.weight_version == "default" for t in output.new_token_ids]
    after = [t for output in outputs if output.weight_version == "v2" for t in output.new_token_ids]
    assert before == weighted_tokens(tokens, len(before), 0, VOCAB)
    assert after == weighted_tokens([*tokens, *before], len(after), 1000, VOCAB)
    # Nothing that the old weights computed is hit.
    engine.update_weights("v3", options={"value": 7})
    assert tokens_of(engine, tokens, 3) == weighted_tokens(tokens, 3, 7, VOCAB)


def test_a_pause_outlasts_an_update(engine: EngineClient) -> None:
    engine.pause_generation("keep")
    engine.update_weights("v2", options={"value": 5})
    assert engine.is_paused() is True


def test_an_update_that_fails_half_way_leaves_a_named_state_and_two_ways_back() -> None:
    config = mock_config(worker_cls=WEIGHTED, tensor_parallel_size=2, step_ms=2)
    with EngineClient.launch(config) as engine:
        engine.update_weights("v2", options={"value": 2})
        tokens = prompt(6, 20)
        for way_back in ("restore", "update"):
            request_id = engine.add_request(tokens, SamplingParams(max_tokens=100))
            outputs = engine.outputs()
            with pytest.raises(UtilityError, match="these weights are no good; some ranks may have"):
                engine.update_weights("v3", options={"value": 3, "fails": 1})
            row = page(engine)
            assert (row["weight_status"], row["weight_version"], row["pause"]) == ("FAILED", "v2", "frozen")
            assert engine.collective_rpc("get_weight") == [3, 2]
            with pytest.raises(RequestError, match="failed half-way"):
                tokens_of(engine, [1], 1)
            with pytest.raises(UtilityError, match="failed half-way"):
                engine.resume_generation()
            if way_back == "restore":
                engine.restore_weights()
            else:
                engine.update_weights("v2", options={"value": 2})
            assert page(engine)["weight_status"] == "NORMAL"
            assert engine.collective_rpc("get_weight") == [2, 2]
            outputs += receive_all(engine)[request_id]
            received = [token for output in outputs for token in output.new_token_ids]
            assert received == weighted_tokens(tokens, 100, 2, VOCAB)
        assert page(engine)["restarts"] == 1


def test_limits_go_down_and_up_but_not_beyond_the_start(engine: EngineClient) -> None:
    assert engine.set_limits(max_num_seqs=2) == {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    assert page(engine)["max_num_seqs"] == 2
    for i in range(6):
        engine.add_request(prompt(i, 10), SamplingParams(max_tokens=30))
    wait_until(lambda: page(engine)["waiting"] == 4, "two run and four wait")
    assert page(engine)["running"] == 2
    assert engine.set_limits(max_num_seqs=6)["max_num_seqs"] == 6
    receive_all(engine)
    with pytest.raises(UtilityError, match="max_num_seqs = 9 is not from 1 to 8"):
        engine.set_limits(max_num_seqs=9)
    with pytest.raises(UtilityError, match="max_num_batched_tokens = 65 is not from"):
        engine.set_limits(max_num_batched_tokens=65)
    with pytest.raises(UtilityError, match="max_num_batched_tokens = 3 is not from"):
        engine.set_limits(max_num_batched_tokens=3)


def test_requests_end_when_their_time_is_up(engine: EngineClient) -> None:
    tokens = prompt(7, 10)
    received: list[int] = []
    with pytest.raises(RequestError) as late:
        for output in engine.generate(tokens, SamplingParams(max_tokens=4000), deadline_s=0.2):
            received += output.new_token_ids
    assert late.value.code == "deadline_exceeded"
    assert f"it had {len(received)} tokens" in late.value.message
    assert received == expected(tokens, len(received))
    with pytest.raises(RequestError, match="no time left"):
        list(engine.generate(tokens, deadline_s=0.0))
    with pytest.raises(RequestError, match="must be a number"):
        list(engine.generate(tokens, SamplingParams(extra_args={"deadline_s": "soon"})))
    assert tokens_of(engine, tokens, 5) == expected(tokens, 5)


def test_a_deadline_passes_while_the_engine_is_paused(engine: EngineClient) -> None:
    engine.pause_generation("keep")
    with pytest.raises(RequestError, match="it had 0 tokens"):
        list(engine.generate(prompt(8, 10), deadline_s=0.2))


def test_a_deadline_of_years_is_one(engine: EngineClient) -> None:
    engine.pause_generation("keep")
    engine.add_request([5, 6], SamplingParams(max_tokens=3), request_id="patient", deadline_s=1e10)
    assert engine.outputs(0.3) == []
    engine.resume_generation()
    assert [t for o in receive_all(engine)["patient"] for t in o.new_token_ids] == expected([5, 6], 3)


def test_a_barrier_names_the_ranks_that_are_missing_and_what_they_do(engine: EngineClient) -> None:
    assert engine.barrier("all here") is None
    with pytest.raises(UtilityError, match=r"collective_rpc|nap"):
        engine.collective_rpc("nap", 0.05, [1.5, 1])
    with pytest.raises(UtilityError, match=r"barrier 'lunch': not reached within 0.2 s by rank 1 \(in nap"):
        engine.barrier("lunch", 0.2)
    assert engine.barrier("awake", 20.0) is None


def test_adapters_are_kept_account_of(engine: EngineClient) -> None:
    adapter = LoRARequest("poet", 3, "/adapters/poet")
    assert engine.add_lora(adapter) is True
    assert engine.add_lora(adapter) is False
    assert engine.list_loras() == [3]
    assert engine.pin_lora(3) is True
    with pytest.raises(UtilityError, match="id 3 is that of adapter poet"):
        engine.add_lora(LoRARequest("other", 3, "/adapters/other"))
    request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=100), lora=adapter)
    engine.outputs()
    with pytest.raises(UtilityError, match="in use by 1 live request"):
        engine.remove_lora(3)
    engine.abort(request_id)
    assert engine.remove_lora(3) is True
    assert engine.list_loras() == []
    receive_all(engine)


def test_ranks_are_profiled(engine: EngineClient, tmp_path: Path) -> None:
    engine.start_profile(str(tmp_path / "p-"))
    tokens_of(engine, [1, 2], 10)
    files = engine.stop_profile()
    assert files == [str(tmp_path / f"p-rank{rank}.prof") for rank in range(2)]
    for file in files:
        functions = {name for _, _, name in pstats.Stats(file).stats}  # type: ignore[attr-defined]
        assert "execute_model" in functions
    with pytest.raises(UtilityError, match="does not run"):
        engine.stop_profile()
    with pytest.raises(UtilityError, match=r"No such file or directory: '/nowhere/p-rank0.prof'"):
        engine.start_profile("/nowhere/p-")
    engine.start_profile(str(tmp_path / "again-"))  # what could not begin is in nobody's way
    engine.stop_profile()
