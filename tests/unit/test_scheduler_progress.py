"""No request waits for ever: whatever the load, it ends, and in no more steps than the work explains."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_core.config import EngineConfig
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.scheduler import Scheduler
from executor.step import LoRARequest
from tests.scheduling import all_outputs, answer, make_request


class Load:
    """A scheduler under load, with `depth` steps in flight; counts what each request waited."""

    def __init__(self, num_blocks: int, **fields: Any) -> None:
        fields = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "async_scheduling": False, **fields}
        self.scheduler = Scheduler(EngineConfig(**fields), num_blocks, 4096)
        self.depth = 2 if fields["async_scheduling"] else 1
        self.in_flight: list[Any] = []
        self.finished: dict[str, int] = {}  # id: step
        self.step = 0

    def add(self, request_id: str, prompt_length: int, max_tokens: int, **fields: Any) -> Request:
        prompt = [len(self.scheduler.requests) % 900, *range(prompt_length - 1)]
        request = make_request(request_id, prompt, self.scheduler, max_tokens=max_tokens, **fields)
        self.scheduler.add_request(request)
        return request

    def run_step(self) -> None:
        self.step += 1
        step = self.scheduler.schedule() if self.scheduler.has_requests() else None
        if step is not None:
            self.in_flight.append((step, answer(self.scheduler, step)))
        while self.in_flight and (len(self.in_flight) >= self.depth or step is None or not len(step.slots)):
            outputs = self.scheduler.update_from_output(*self.in_flight.pop(0))
            for output in all_outputs(outputs).values():
                if output.finish_reason is not None:
                    self.finished[output.request_id] = self.step

    def run(self, max_steps: int) -> None:
        while self.scheduler.has_requests() or self.in_flight:
            self.run_step()
            assert self.step <= max_steps, f"still live: {list(self.scheduler.requests.values())}"
        assert self.scheduler.check() == []


MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


@MODES
@POLICIES
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_preemptions_ends(seed: int, reserve: bool, policy: str, is_async: bool) -> None:
    """The pool holds one request and a bit, and everybody wants to run."""
    rng = random.Random(seed)
    load = Load(
        12,
        scheduling_policy=policy,
        async_scheduling=is_async,
        scheduler_reserve_full_isl=reserve,
        watermark=0.1,
    )
    tokens = 0
    for i in range(30):
        prompt, output = rng.randint(1, 100), rng.randint(1, 70)
        load.add(f"r{i}", prompt, output, priority=rng.randint(0, 3), arrival_time=float(i))
        tokens += prompt + output
    load.run(4 * tokens)
    assert len(load.finished) == 30


@MODES
def test_a_giant_prompt_is_not_starved_by_small_ones(is_async: bool) -> None:
    """It needs nearly the whole pool; small requests keep coming, and wait behind it when it is its turn."""
    load = Load(70, async_scheduling=is_async)
    for i in range(4):
        load.add(f"before-{i}", 30, 20)
    load.add("giant", 1000, 5)
    for i in range(400):
        load.add(f"after-{i}", 30, 20)
        load.run_step()
        if "giant" in load.finished:
            break
    assert "giant" in load.finished
    assert load.finished["giant"] < 100


@MODES
def test_small_requests_run_beside_a_giant_prompt(is_async: bool) -> None:
    """With a long-prefill threshold, its chunks leave budget to those behind it."""
    load = Load(200, async_scheduling=is_async, long_prefill_token_threshold=16)
    load.add("giant", 2000, 1)
    for i in range(20):
        load.add(f"r{i}", 10, 5)
    load.run(2000)
    assert max(step for name, step in load.finished.items() if name != "giant") < load.finished["giant"]


@MODES
def test_a_flood_of_better_priority_only_delays(is_async: bool) -> None:
    load = Load(20, scheduling_policy="priority", async_scheduling=is_async)
    load.add("humble", 60, 40, priority=5, arrival_time=0.0)
    for i in range(60):
        load.add(f"vip-{i}", 40, 20, priority=0, arrival_time=1.0 + i)
        load.run_step()
    assert "humble" not in load.finished
    load.run(5000)
    assert len(load.finished) == 61


@MODES
def test_equal_priorities_are_served_in_order_of_arrival(is_async: bool) -> None:
    load = Load(100, scheduling_policy="priority", async_scheduling=is_async, max_num_seqs=1)
    for i in (3, 1, 2, 0):
        load.add(f"r{i}", 5, 3, priority=1, arrival_time=float(i))
    load.run(100)
    assert sorted(load.finished, key=load.finished.__getitem__) == ["r0", "r1", "r2", "r3"]


@MODES
def test_passed_over_adapters_get_their_turn(is_async: bool) -> None:
    load = Load(100, async_scheduling=is_async, enable_lora=True, max_loras=1)
    for i in range(30):
        which = i % 3
        lora = LoRARequest(f"l{which}", which, f"/{which}") if which else None
        load.add(f"r{i}", 20, 10, lora=lora)
    load.run(500)
    assert len(load.finished) == 30
    assert load.scheduler.admission.deferred == set()


@MODES
@pytest.mark.parametrize("interval", [2, 7])
def test_held_back_prefills_get_their_turn(interval: int, is_async: bool) -> None:
    load = Load(100, async_scheduling=is_async, prefill_schedule_interval=interval)
    for i in range(20):
        load.add(f"r{i}", 150, 30)
        load.run_step()
    load.run(5000)
    assert len(load.finished) == 20


@MODES
def test_a_watermark_admits_the_largest_request_once_the_batch_is_empty(is_async: bool) -> None:
    load = Load(20, async_scheduling=is_async, watermark=0.5)
    load.add("small", 16, 10)
    load.add("large", 16 * 18, 3)  # 18 of 19 blocks; the watermark alone would keep 10 free
    load.run(200)
    assert len(load.finished) == 2


@MODES
def test_aborts_let_the_next_ones_run(is_async: bool) -> None:
    rng = random.Random(3)
    load = Load(20, async_scheduling=is_async)
    for i in range(100):
        load.add(f"r{i}", rng.randint(1, 200), 50)
        load.run_step()
        if i % 2:
            load.scheduler.finish_requests([f"r{i}", f"r{i - 1}"], FinishReason.ABORT)
    load.add("last", 10, 5)
    load.run(200)
    assert load.finished["last"]
