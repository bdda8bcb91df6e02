"""Random work for a scheduler, and an engine core whose every token is checked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.outputs import StepOutputs
from engine_core.protocol import EngineCoreOutput, FinishReason
from engine_core.request import Request
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.base import make_executor
from executor.mock_model import mock_tokens
from executor.sampling_params import RepetitionDetectionParams, SamplingParams
from executor.step import Int32s, LoRARequest, ModelRunnerOutput, SchedulerOutput


def make_request(
    request_id: str,
    prompt: list[int] | Int32s,
    scheduler: Scheduler,
    *,
    max_tokens: int | None = 16,
    **kw: Any,
) -> Request:
    """Keywords of `Request` go there, all others to the sampling parameters."""
    names = (
        "client_index",
        "priority",
        "arrival_time",
        "cache_salt",
        "lora",
        "trace_headers",
        "abort_immediately",
    )
    own = {name: kw.pop(name) for name in names if name in kw}
    params = SamplingParams(max_tokens=max_tokens, **kw)
    return Request(request_id, np.array(prompt, np.int32), params, block_hasher=scheduler.hasher, **own)


def answer(scheduler: Scheduler, step: SchedulerOutput, token: int = 7) -> ModelRunnerOutput:
    """What workers answer to the step just scheduled: `token` for each row that computes its last known
    token.
    """
    record = scheduler.batch.in_flight[-1]
    assert record.step_id == step.step_id
    sampled = scheduler.batch.columns().chunk[record.row_list()] == 0
    return ModelRunnerOutput(
        step.step_id, np.full((len(sampled), 1), token, np.int32), sampled.astype(np.int32)
    )


def run_step(scheduler: Scheduler, token: int = 7) -> StepOutputs:
    step = scheduler.schedule()
    return scheduler.update_from_output(step, answer(scheduler, step, token))


def all_outputs(outputs: StepOutputs) -> dict[str, EngineCoreOutput]:
    """Plain rows included, by request id."""
    found = {}
    for client in outputs.values():
        for request, token in zip(client.requests, client.token_ids.tolist(), strict=True):
            found[request.request_id] = EngineCoreOutput(request.request_id, [token])
        for output in client.outputs:
            assert output.request_id not in found
            found[output.request_id] = output
    return found


@dataclass
class Workload:
    """A configuration, and what happens before each step: arrivals, aborts, and operations on the
    scheduler.
    """

    config: EngineConfig
    num_blocks: int
    max_model_len: int
    arrivals: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    aborts: dict[int, list[str]] = field(default_factory=dict)
    operations: dict[int, str] = field(default_factory=dict)

    @property
    def last_event(self) -> int:
        return max((*self.arrivals, *self.aborts, *self.operations), default=0)

    def before_step(self, step: int, scheduler: Scheduler) -> None:
        for spec in self.arrivals.get(step, ()):
            scheduler.add_request(make_request(spec["request_id"], scheduler=scheduler, **spec["fields"]))
        scheduler.finish_requests(self.aborts.get(step, ()), FinishReason.ABORT)
        match self.operations.get(step):
            case "reset":
                scheduler.reset_prefix_cache()
            case "reset_running":
                assert scheduler.reset_prefix_cache(reset_running=True)
            case "pause_new":
                scheduler.set_pause_state(PauseState.PAUSED_NEW)
            case "pause_all":
                scheduler.set_pause_state(PauseState.PAUSED_ALL)
            case "resume":
                scheduler.set_pause_state(PauseState.UNPAUSED)


def random_workload(seed: int, *, is_async: bool | None = None, vocab_size: int = 1000) -> Workload:
    """Small pools, shared prefixes, all options. Every request fits the pool alone."""
    rng = random.Random(seed)
    choice = rng.choice
    block_size = choice([1, 4, 8, 16, 16, 32])
    num_blocks = choice([600, 900, 1500, 8000]) // block_size + 2
    max_model_len = choice([256, 400, 2048])
    budget = choice([32, 64, 128, 256, 512])
    seats = min(choice([2, 4, 8, 16, 32]), budget)
    chunked = rng.random() < 0.9
    if not chunked:
        budget, max_model_len = 512, 400
    num_loras = choice([0, 0, 0, 1, 2])
    config = EngineConfig(
        max_num_seqs=seats,
        max_num_active_seqs=choice([None, None, max(1, seats // 2)]),
        max_num_batched_tokens=budget,
        max_num_scheduled_tokens=choice([None, max(seats, budget // 2)]) if chunked else None,
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.8,
        scheduling_policy=choice(["fcfs", "fcfs", "priority"]),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=choice([0, 0, 16, 48]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.3,
        watermark=choice([0.0, 0.0, 0.05, 0.15]),
        scheduler_reserve_full_isl=rng.random() < 0.7,
        prefill_schedule_interval=choice([1, 1, 1, 3]),
        async_scheduling=rng.random() < 0.6 if is_async is None else is_async,
        enable_lora=num_loras > 0,
        max_loras=max(1, num_loras),
        log_stats=rng.random() < 0.5,
    )
    work = Workload(config, num_blocks, max_model_len)
    capacity = (num_blocks - 1) * block_size
    longest_prompt = min(choice([40, 150, 350]), max_model_len - 1, capacity // 2)
    longest_output = choice([5, 40, 120])
    gap = choice([0, 1, 2, 3])
    shared = choice([0.0, 0.5, 0.9])
    aborted = choice([0.0, 0.1, 0.4])
    stems = [[rng.randrange(10, vocab_size) for _ in range(400)] for _ in range(3)]
    step = 0
    reading = random.Random(-seed)
    for i in range(choice([20, 50])):
        step += rng.randint(0, gap)
        length = rng.randint(1, longest_prompt)
        cut = rng.randint(0, length) if rng.random() < shared else 0
        prompt = choice(stems)[:cut] + [rng.randrange(10, vocab_size) for _ in range(length - cut)]
        fields: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.randint(1, longest_output),
            "client_index": choice([0, 0, 0, 1, 2]),
            "priority": rng.randint(0, 3),
            "arrival_time": float(i),
            "cache_salt": choice([None, None, "a", "b"]),
            "min_tokens": choice([0, 0, 3]),
        }
        if reading.random() < 0.15:
            fields["skip_reading_prefix_cache"] = True
        if rng.random() < 0.3:
            fields["eos_token_id"] = rng.randrange(vocab_size)
        if rng.random() < 0.3:
            fields["stop_token_ids"] = [rng.randrange(vocab_size) for _ in range(vocab_size // 50 + 1)]
        if rng.random() < 0.2:
            fields["repetition_detection"] = RepetitionDetectionParams(
                max_pattern_size=rng.randint(1, 3), min_count=rng.randint(2, 3)
            )
        if num_loras and rng.random() < 0.6:
            which = rng.randint(1, 4)
            fields["lora"] = LoRARequest(f"lora-{which}", which, f"/loras/{which}")
        work.arrivals.setdefault(step, []).append({"request_id": f"r{i}", "fields": fields})
        if rng.random() < aborted:
            work.aborts.setdefault(step + rng.randint(0, 60), []).append(f"r{i}")
    for _ in range(choice([0, 0, 1, 3])):
        at = rng.randint(0, step + 40)
        operation = choice(["reset", "reset_running", "pause_new", "pause_all"])
        work.operations[at] = operation
        if operation.startswith("pause"):
            work.operations[at + rng.randint(1, 5)] = "resume"
    if work.operations and not work.operations[max(work.operations)].startswith("re"):
        work.operations[max(work.operations) + 1] = "resume"
    return work


@dataclass
class Outcome:
    """What a request got."""

    prompt: Int32s
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class CheckedCore:
    """An engine core over a mock worker in process. After every step its accounts are checked; in the end,
    tokens.
    """

    def __init__(self, config: EngineConfig, *, check: bool = True, **options: Any) -> None:
        self.core = EngineCore(config, make_executor(config.executor_config()), **options)
        self.scheduler = self.core.scheduler
        self.requests: dict[str, Outcome] = {}
        self.num_steps = 0
        self._check = check

    def add(self, request_id: str, prompt: list[int] | Int32s, **fields: Any) -> Request:
        request = make_request(request_id, prompt, self.scheduler, **fields)
        self.core.add_request(request)
        self.requests[request_id] = Outcome(request.prompt)
        return request

    def abort(self, *request_ids: str) -> None:
        for request in self.core.abort_requests(request_ids):
            self.requests[request.request_id].finish_reason = request.finish_reason

    def step(self) -> dict[str, EngineCoreOutput]:
        outputs = all_outputs(self.core.step_fn())
        self.num_steps += 1
        for output in outputs.values():
            outcome = self.requests[output.request_id]
            assert outcome.finish_reason is None, f"{output.request_id} had ended"
            outcome.tokens += output.new_token_ids
            outcome.finish_reason = output.finish_reason
        if self._check:
            assert self.scheduler.check() == []
        return outputs

    def run(self, max_steps: int = 20_000) -> None:
        """Until all is done."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.requests}")

    def assert_tokens_right(self) -> None:
        vocab_size = self.core.capacity.vocab_size
        for request_id, outcome in self.requests.items():
            expected = mock_tokens(outcome.prompt, len(outcome.tokens), vocab_size).tolist()
            assert outcome.tokens == expected, f"{request_id} got wrong tokens"
