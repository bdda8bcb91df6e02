"""Engines in processes of their own, with mock workers: every token that comes out is the right one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine_core.client import EngineClient, InprocClient, RequestOutput
from engine_core.errors import RequestError, UtilityError
from executor.sampling_params import SamplingParams
from tests.engines import expected, mock_config, prompt

Client = EngineClient | InprocClient


def receive_all(client: Client) -> dict[str, list[RequestOutput]]:
    """Everything up to the last output of every request that was added."""
    outputs = defaultdict(list)
    while client.num_live:
        for output in client.outputs(timeout_s=30):
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineClient]:
    """One engine for tests that leave it as it was; others may join."""
    with EngineClient.launch(mock_config(), lobby="ipc://@engine-core-test-serving") as client:
        yield client


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_schedulers_give_the_same_tokens(ranks: int, async_scheduling: bool) -> None:
    config = mock_config(tensor_parallel_size=ranks, async_scheduling=async_scheduling)
    with EngineClient.launch(config) as client:
        assert client.info.world_size == ranks
        prompts = [prompt(seed, 1 + 37 * seed) for seed in range(30)]
        ids = [client.add_request(p, SamplingParams(max_tokens=1 + i)) for i, p in enumerate(prompts)]
        outputs = receive_all(client)
        for i, request_id in enumerate(ids):
            assert tokens_of(outputs[request_id]) == expected(prompts[i], 1 + i)
            assert outputs[request_id][-1].finish_reason == "length"


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preemption_in_a_small_pool_changes_no_token(async_scheduling: bool) -> None:
    config = mock_config(num_blocks=60, max_model_len=512, async_scheduling=async_scheduling)
    with EngineClient.launch(config) as client:
        prompts = [prompt(seed, 30 + seed) for seed in range(20)]
        ids = [client.add_request(p, SamplingParams(max_tokens=100)) for p in prompts]
        outputs = receive_all(client)
        preempted = sum(
            event.type == 3 for request in outputs.values() for o in request for event in o.events or ()
        )
        assert preempted > 0
        for request_id, tokens in zip(ids, prompts, strict=True):
            assert tokens_of(outputs[request_id]) == expected(tokens, 100)


def test_a_thousand_concurrent_requests() -> None:
    config = mock_config(num_blocks=20_000, max_num_seqs=1024, max_num_batched_tokens=8192)
    with EngineClient.launch(config) as client:
        prompts = [prompt(seed, 5 + seed % 50) for seed in range(1000)]
        ids = [client.add_request(p, SamplingParams(max_tokens=10 + i % 20)) for i, p in enumerate(prompts)]
        outputs = receive_all(client)
        assert all(
            tokens_of(outputs[request_id]) == expected(prompts[i], 10 + i % 20)
            for i, request_id in enumerate(ids)
        )


def test_three_clients_at_once_get_their_own(shared: EngineClient) -> None:
    address = "ipc://@engine-core-test-serving"
    with EngineClient.connect(address) as second, EngineClient.connect(address) as third:
        clients = [shared, second, third]
        assert len({client.client_index for client in clients}) == 3
        sent = {}
        for i in range(60):
            client = clients[i % 3]
            tokens = prompt(1000 + i, 20 + i)
            sent[client.add_request(tokens, SamplingParams(max_tokens=30))] = (client, tokens)
        outputs = {client: receive_all(client) for client in clients}
        for request_id, (client, tokens) in sent.items():
            assert tokens_of(outputs[client][request_id]) == expected(tokens, 30)


def test_stream_brings_a_token_at_a_time(shared: EngineClient) -> None:
    tokens = prompt(1, 50)
    outputs = list(shared.generate(tokens, SamplingParams(max_tokens=12)))
    assert [output.new_token_ids for output in outputs] == [[t] for t in expected(tokens, 12)]
    assert [output.finish_reason for output in outputs] == [None] * 11 + ["length"]
    assert outputs[0].num_cached_tokens is not None and outputs[1].num_cached_tokens is None


def test_streams_can_be_interleaved_and_left(shared: EngineClient) -> None:
    first, second = prompt(2, 20), prompt(3, 20)
    left = shared.generate(first, SamplingParams(max_tokens=4000))
    right = shared.generate(second, SamplingParams(max_tokens=20))
    assert next(left).new_token_ids == expected(first, 1)
    assert tokens_of(list(right)) == expected(second, 20)
    left.close()  # type: ignore[attr-defined]
    assert shared.num_live == 0
    assert shared.utility("is_sleeping") is False
    tokens = prompt(4, 20)
    assert tokens_of(list(shared.generate(tokens, SamplingParams(max_tokens=5)))) == expected(tokens, 5)


def test_abort_returns_when_nothing_follows(shared: EngineClient) -> None:
    ids = [shared.add_request(prompt(i, 30), SamplingParams(max_tokens=4000)) for i in range(5)]
    seen = {output.request_id for output in shared.outputs()}
    shared.abort(ids[:3])
    shared.abort("no such request")
    last = {output.request_id: output for output in shared.outputs(timeout_s=0)}
    assert all(last[request_id].finish_reason == "abort" for request_id in ids[:3])
    assert seen and shared.num_live == 2
    later = {output.request_id for _ in range(20) for output in shared.outputs()}
    assert later == set(ids[3:])
    shared.abort(ids)
    shared.outputs(timeout_s=0)
    assert shared.num_live == 0


@pytest.mark.parametrize("step_ms", [0, 10])
def test_abort_at_every_phase(step_ms: float) -> None:
    """Waiting, in a chunked prefill, decoding, with a step in flight, and over already."""
    config = mock_config(
        num_blocks=200, max_model_len=2048, max_num_seqs=2, max_num_batched_tokens=64, step_ms=step_ms
    )
    with EngineClient.launch(config) as client:
        for num_steps in range(6):
            long = client.add_request(prompt(1, 300), SamplingParams(max_tokens=50))
            other = client.add_request(prompt(2, 20), SamplingParams(max_tokens=num_steps + 1))
            waiting = client.add_request(prompt(3, 20), SamplingParams(max_tokens=3))
            for _ in range(num_steps):
                client.outputs(timeout_s=0.02)
            client.abort([long, waiting])
            outputs = receive_all(client)
            assert not {long, waiting} & {i for i, o in outputs.items() if o[-1].finish_reason != "abort"}
            del other
        # No slot and no block is lost: the whole pool and both seats still serve.
        tokens = [prompt(5, 1400), prompt(6, 1400)]
        ids = [client.add_request(t, SamplingParams(max_tokens=20)) for t in tokens]
        outputs = receive_all(client)
        for request_id, t in zip(ids, tokens, strict=True):
            assert tokens_of(outputs[request_id]) == expected(t, 20)
        assert client.utility("reset_prefix_cache") is True


def test_logprobs_come_in_rank_order(shared: EngineClient) -> None:
    tokens = prompt(7, 40)
    params = SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2)
    outputs = list(shared.generate(tokens, params))
    for output in outputs:
        assert output.logprobs is not None
        assert output.logprobs.logprob_token_ids.shape == (1, 4)
        assert output.logprobs.logprob_token_ids[0, 0] == output.new_token_ids[0]
        assert output.logprobs.sampled_token_ranks.tolist() == [1]
        assert (np.diff(output.logprobs.logprobs[0, 1:]) < 0).all()
    lines = outputs[0].prompt_logprobs
    assert lines is not None and lines.logprob_token_ids.shape == (39, 3)
    assert lines.logprob_token_ids[:, 0].tolist() == tokens[1:]
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_logprobs_of_the_whole_vocabulary_travel(shared: EngineClient) -> None:
    (output,) = shared.generate(prompt(8, 4), SamplingParams(max_tokens=1, logprobs=-1))
    assert output.logprobs is not None and output.logprobs.logprobs.shape == (1, 32001)


def test_priority_is_served_first() -> None:
    config = mock_config(scheduling_policy="priority", max_num_seqs=1, step_ms=2)
    with EngineClient.launch(config) as client:
        running = client.add_request(prompt(1, 5), SamplingParams(max_tokens=40), priority=-1)
        client.outputs()
        low = client.add_request(prompt(2, 5), SamplingParams(max_tokens=5), priority=5)
        high = client.add_request(prompt(3, 5), SamplingParams(max_tokens=5), priority=0)
        order = []
        while client.num_live:
            order += [output.request_id for output in client.outputs() if output.finished]
        assert order == [running, high, low]


def test_refusals_reach_the_caller_with_code_and_text(shared: EngineClient) -> None:
    for bad, message in (([], "empty"), ([-1], "vocabulary"), ([1] * 4096, "max_model_len")):
        with pytest.raises(RequestError, match=message) as caught:
            list(shared.generate(bad))
        assert caught.value.code == "validation_error" and not caught.value.retryable
    no_ids: list[tuple[Any, str]] = [
        (["a"], "token 0 of the prompt is 'a', and no token id"),
        ([1, 2**70], f"token 1 of the prompt is {2**70}, and"),
        ([1, 2**40], f"token 1 of the prompt is {2**40}, and"),
        ([1.7, 2], "token 0 of the prompt is 1.7"),
        ([True], "token 0 of the prompt is True"),
        ("123", "not a list of token ids but '123'"),
        (5, "not a list of token ids but 5"),
        (None, "not a list of token ids but None"),
    ]
    for bad, message in no_ids:
        with pytest.raises(RequestError, match=message):
            shared.add_request(bad)
    request_id = shared.add_request([1], SamplingParams(max_tokens=0))
    (output,) = shared.outputs()
    assert output.request_id == request_id and output.finish_reason == "error"
    assert output.error is not None and "max_tokens" in output.error.message


def test_ids_of_the_caller_are_kept_and_must_be_new(shared: EngineClient) -> None:
    shared.add_request([1, 2], SamplingParams(max_tokens=4000), request_id="mine")
    with pytest.raises(RequestError, match="live"):
        shared.add_request([1, 2], request_id="mine")
    with EngineClient.connect("ipc://@engine-core-test-serving") as other:
        other.add_request([1, 2], request_id="mine")
        (output,) = other.outputs()
        assert output.error is not None and output.error.code == "duplicate_request_id"
    assert all(output.error is None for output in shared.outputs())
    shared.abort("mine")
    shared.outputs(timeout_s=0)


def test_queue_limit_refuses_with_a_retryable_error() -> None:
    config = mock_config(max_num_queued_reqs=2, step_ms=5)
    with EngineClient.launch(config) as client:
        for _ in range(3):
            client.add_request(prompt(1, 10), SamplingParams(max_tokens=50))
        errors = [output.error for output in client.outputs() if output.error is not None]
        assert [error.code for error in errors] == ["queue_full"] and errors[0].retryable


def test_utility_calls_answer_or_raise(shared: EngineClient) -> None:
    assert shared.utility("get_supported_tasks") == ["generate"]
    assert shared.collective_rpc("check_health") == [None]
    with pytest.raises(UtilityError, match="Call to nonsense method failed"):
        shared.utility("nonsense")


def test_calls_reach_every_rank() -> None:
    with EngineClient.launch(mock_config(tensor_parallel_size=2)) as client:
        assert client.collective_rpc("list_loras") == [[], []]
        with pytest.raises(UtilityError, match="no_such_method"):
            client.collective_rpc("no_such_method")
        tokens = prompt(1, 5)
        assert tokens_of(list(client.generate(tokens, SamplingParams(max_tokens=3)))) == expected(tokens, 3)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_inproc_client_gives_the_same(async_scheduling: bool) -> None:
    with InprocClient(mock_config(async_scheduling=async_scheduling)) as client:
        prompts = [prompt(seed, 10 + seed) for seed in range(10)]
        ids = [client.add_request(p, SamplingParams(max_tokens=12)) for p in prompts]
        outputs = receive_all(client)
        for request_id, tokens in zip(ids, prompts, strict=True):
            assert tokens_of(outputs[request_id]) == expected(tokens, 12)
        stream = client.generate(prompts[0], SamplingParams(max_tokens=3))
        assert tokens_of(list(stream)) == expected(prompts[0], 3)
        running = client.add_request(prompts[0], SamplingParams(max_tokens=100))
        client.outputs()
        client.abort(running)
        assert client.outputs()[-1].finish_reason == "abort"
        assert client.utility("get_supported_tasks") == ["generate"]
        with pytest.raises(RequestError):
            list(client.generate([]))
        assert client.core.scheduler.check() == []
