"""SmolLM2 says what Hugging Face transformers makes it say, however the engine cuts up the work.

A part of this runs by default; `-m slow` runs all prompts to their end under every configuration.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine_core.core import EngineCore
from executor.sampling_params import SamplingParams
from tests.smollm2 import Result, assert_matches, engine, greedy, needs_model, reference, run

pytestmark = needs_model

PROMPTS = reference()
SHORT = sorted(PROMPTS, key=lambda record: len(record["prompt_token_ids"]))[3:17:2]  # 7 of them


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    with engine() as core:
        yield core


@pytest.mark.timeout(300)
@pytest.mark.parametrize("max_tokens", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_all_prompts_in_one_batch_give_the_reference_tokens_and_logprobs(
    core: EngineCore, max_tokens: int
) -> None:
    params = greedy(max_tokens, logprobs=5, prompt_logprobs=0)
    results = run(core, [record["prompt_token_ids"] for record in PROMPTS], params)
    for record, result in zip(PROMPTS, results, strict=True):
        expected = record["output_token_ids"][:max_tokens]
        assert_matches(record, result.tokens)
        same = next(
            (i for i, (a, b) in enumerate(zip(result.tokens, expected, strict=False)) if a != b),
            len(expected),
        )
        for logprobs, step in zip(result.logprobs[:same], record["steps"], strict=False):
            for token_id, logprob in step["top"]:
                assert logprobs[token_id] == pytest.approx(logprob, abs=1e-3)
        if of_prompt := record["prompt_logprobs"][1:]:
            assert result.prompt_logprobs == pytest.approx(of_prompt, abs=1e-3)


def test_a_prompt_alone_gives_what_it_gives_in_a_batch_of_32(core: EngineCore) -> None:
    record = PROMPTS[1]
    others = [r["prompt_token_ids"] for r in PROMPTS] + [
        r["prompt_token_ids"][:-1] for r in SHORT + SHORT[:4]
    ]
    [alone] = run(core, [record["prompt_token_ids"]], greedy(6))
    together = run(core, [record["prompt_token_ids"], *others], greedy(6))
    assert len(together) == 32
    assert_matches(record, alone.tokens)
    assert_matches(record, together[0].tokens)


def test_seeded_sampling_does_not_depend_on_the_batch(core: EngineCore) -> None:
    prompts = [r["prompt_token_ids"] for r in SHORT]
    each = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=8) for i in range(len(prompts))]
    together = run(core, prompts, each)
    again = run(core, prompts[::-1], each[::-1])
    assert [r.tokens for r in again[::-1]] == [r.tokens for r in together]
    assert len({tuple(r.tokens) for r in together}) == len(prompts)


def check(records: list[dict[str, Any]], max_tokens: int, **config: Any) -> list[Any]:
    with engine(**config) as core:
        results = run(core, [r["prompt_token_ids"] for r in records], greedy(max_tokens))
        for record, result in zip(records, results, strict=True):
            assert_matches(record, result.tokens)
            assert len(result.tokens) == min(max_tokens, len(record["output_token_ids"]))
        return results


CONFIGS: dict[str, dict[str, Any]] = {
    "chunks_of_16": {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    "chunks_of_16_sync": {"max_num_seqs": 16, "max_num_batched_tokens": 16, "async_scheduling": False},
    "sync": {"async_scheduling": False},
    "block_size_1": {"block_size": 1, "num_gpu_blocks_override": 16384},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "own_process": {"distributed_executor_backend": "mp"},
    "tp_3": {"tensor_parallel_size": 3},
    "tp_3_sync_chunks": {
        "tensor_parallel_size": 3,
        "async_scheduling": False,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 16,
    },
}


def test_chunked_prefill_gives_the_same_tokens() -> None:
    check(SHORT, 6, **CONFIGS["chunks_of_16"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CONFIGS)
def test_all_prompts_under_every_configuration(name: str) -> None:
    check(PROMPTS, 64, **CONFIGS[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["own_process", "tp_3"])
def test_every_prompt_alone(name: str) -> None:
    with engine(**CONFIGS[name]) as core:
        for record in PROMPTS:
            [result] = run(core, [record["prompt_token_ids"]], greedy(64))
            assert_matches(record, result.tokens)


def test_prefix_hits_give_the_same_tokens(core: EngineCore) -> None:
    record = max(PROMPTS, key=lambda r: len(r["prompt_token_ids"]))
    prompt = record["prompt_token_ids"]
    assert core.reset_prefix_cache()
    cold, warm = (run(core, [prompt], greedy(4))[0] for _ in range(2))
    assert cold.cached_tokens == 0 and warm.cached_tokens > len(prompt) - 17
    assert warm.tokens == cold.tokens
    assert_matches(record, warm.tokens)
    # The second finds blocks that the first computes in the same step.
    assert core.reset_prefix_cache()
    first, second = run(core, [prompt, prompt], greedy(4))
    assert second.cached_tokens > 0 and first.tokens == second.tokens == cold.tokens


@pytest.mark.parametrize("tp", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_pool_so_small_that_requests_are_preempted(tp: int) -> None:
    records = sorted(PROMPTS, key=lambda r: len(r["prompt_token_ids"]))[:6]
    needed = [-(-(len(r["prompt_token_ids"]) + 24) // 4) for r in records]
    results = check(
        records,
        24,
        tensor_parallel_size=tp,
        block_size=4,
        num_gpu_blocks_override=max(needed) * 2,
        max_model_len=128,
        enable_prefix_caching=False,
    )
    assert sum(result.preemptions for result in results) >= 2


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_no_token(ranks: int) -> None:
    records = SHORT[:3]
    prompts = [r["prompt_token_ids"] for r in records]
    with engine(tensor_parallel_size=ranks, distributed_executor_backend="mp") as core:
        victims = iter(core.executor.pids[-1:])  # type: ignore[attr-defined]

        def kill_after_some_tokens(results: dict[str, Result]) -> None:
            if all(len(result.tokens) >= 3 for result in results.values()):
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)

        params = [greedy(10), greedy(10), SamplingParams(temperature=0.9, seed=7, max_tokens=10)]
        results = run(core, prompts, params, kill_after_some_tokens)
        assert core.num_restarts == 1 and next(victims, None) is None
        undisturbed = run(core, prompts, params)
    assert [r.tokens for r in results] == [r.tokens for r in undisturbed]
    for record, result in zip(records[:2], results[:2], strict=True):
        assert_matches(record, result.tokens)


def test_three_ranks_give_the_tokens_and_logprobs_of_one(core: EngineCore) -> None:
    params = [
        SamplingParams(temperature=1.0, top_k=50, max_tokens=6, logprobs=2, prompt_logprobs=1, seed=1),
        SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.2, max_tokens=6),
        *[greedy(6)] * 3,
    ]
    prompts = [r["prompt_token_ids"] for r in SHORT[:5]]
    one = run(core, prompts, params)
    with engine(tensor_parallel_size=3) as sharded:
        three = run(sharded, prompts, params)
    for a, b in zip(one, three, strict=True):
        assert a.tokens == b.tokens
        for first, second in zip(a.logprobs, b.logprobs, strict=True):
            np.testing.assert_allclose(list(first.values()), list(second.values()), atol=1e-4)
    assert three[0].prompt_logprobs == pytest.approx(one[0].prompt_logprobs, abs=1e-4)
    for record, result in zip(SHORT[2:5], three[2:], strict=True):
        assert_matches(record, result.tokens)
