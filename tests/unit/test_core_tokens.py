"""Whatever is decided, every token is the one that the prompt demands: the mock worker's cache proves the
books.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from engine_core.config import EngineConfig
from tests.scheduling import CheckedCore, random_workload


def run_workload(seed: int, is_async: bool) -> CheckedCore:
    work = random_workload(seed, is_async=is_async, vocab_size=1000)
    config = msgspec.structs.replace(
        work.config, num_gpu_blocks_override=work.num_blocks, max_model_len=work.max_model_len
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
    return checked


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(25))
def test_every_token_is_right(seed: int, is_async: bool) -> None:
    """Random options, arrivals, aborts, cache resets and pauses."""
    checked = run_workload(seed, is_async)
    checked.assert_tokens_right()
    for request_id, outcome in checked.requests.items():
        assert outcome.finish_reason is not None, f"{request_id} did not end"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_are_right_under_constant_preemption(policy: str, is_async: bool) -> None:
    rng = random.Random(policy)
    work = random_workload(1)
    config = msgspec.structs.replace(
        work.config,
        scheduling_policy=policy,
        async_scheduling=is_async,
        num_gpu_blocks_override=24,
        max_model_len=300,
        block_size=16,
        max_num_seqs=16,
        max_num_active_seqs=None,
        max_num_batched_tokens=128,
        max_num_scheduled_tokens=None,
        long_prefill_token_threshold=32,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        scheduler_reserve_full_isl=False,
        watermark=0.0,
    )
    checked = CheckedCore(config)
    stem = [rng.randrange(1000) for _ in range(100)]
    requests = []
    for i in range(40):
        prompt = stem[: rng.randint(0, 100)] + [rng.randrange(1000) for _ in range(rng.randint(1, 80))]
        requests.append(
            checked.add(str(i), prompt, max_tokens=100, priority=rng.randint(0, 3), arrival_time=float(i))
        )
    checked.run()
    checked.assert_tokens_right()
    assert sum(request.num_preemptions for request in requests) > 20
    assert all(len(outcome.tokens) == 100 for outcome in checked.requests.values())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_prompt_in_the_cache_gives_the_same_tokens(is_async: bool) -> None:
    checked = CheckedCore(make_config(is_async))
    prompt = list(range(100, 164))
    checked.add("cold", prompt)
    checked.run()
    checked.add("warm", prompt)
    outputs = checked.step() or checked.step()
    checked.run()
    stats = outputs["warm"].prefill_stats
    assert (
        stats is not None and stats.num_cached_tokens == 48
    )  # the last block holds the token to compute again
    assert checked.requests["warm"].tokens == checked.requests["cold"].tokens
    checked.assert_tokens_right()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_of_one_step_share_a_prefix_that_it_computes(is_async: bool) -> None:
    """Admitted together, the second hits blocks that the same step fills."""
    checked = CheckedCore(make_config(is_async))
    prompt = list(range(100, 164))
    checked.add("first", prompt)
    checked.add("second", [*prompt, 5, 6])
    outputs = checked.step() or checked.step()
    stats = outputs["second"].prefill_stats
    assert stats is not None and stats.num_cached_tokens == 64
    checked.run()
    checked.assert_tokens_right()


def make_config(is_async: bool) -> EngineConfig:
    return EngineConfig(
        async_scheduling=is_async, num_gpu_blocks_override=100, max_model_len=1000, max_num_seqs=16
    )
