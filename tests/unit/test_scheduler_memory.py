"""Requests leave nothing behind, and nothing that only the garbage collector could find."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from engine_core.config import EngineConfig
from engine_core.protocol import FinishReason
from engine_core.scheduler import history
from engine_core.scheduler.scheduler import Scheduler
from tests.scheduling import make_request, run_step


def make_scheduler(policy: str, is_async: bool) -> Scheduler:
    config = EngineConfig(
        max_num_seqs=32, max_num_batched_tokens=512, scheduling_policy=policy, async_scheduling=is_async
    )
    return Scheduler(config, 200, 1000)


def serve(scheduler: Scheduler, count: int, seed: int) -> None:
    """Requests of all kinds: some preempted, some aborted while they wait or run."""
    rng = random.Random(seed)
    for i in range(count):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
        request = make_request(
            f"{seed}-{i}",
            prompt,
            scheduler,
            max_tokens=rng.randint(1, 20),
            priority=rng.randint(0, 3),
            stop_token_ids=[1, 2] if i % 3 == 0 else None,
            client_index=i % 4,
        )
        scheduler.add_request(request)
        if i % 2:
            run_step(scheduler)
        if i % 10 == 0:
            scheduler.finish_requests([f"{seed}-{rng.randint(0, i)}"], FinishReason.ABORT)
    while scheduler.has_requests():
        run_step(scheduler)


MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


@MODES
@POLICIES
def test_memory_is_flat_once_the_cache_is_full(
    policy: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_FINISHED", 100)  # fill what is remembered of ended requests sooner
    scheduler = make_scheduler(policy, is_async)
    serve(scheduler, 600, seed=1)
    tracemalloc.start()
    try:
        serve(scheduler, 300, seed=2)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        serve(scheduler, 900, seed=3)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert scheduler.requests == {} and scheduler.check() == []
    assert grown < 100_000  # of content that the cache holds, names of it, and queues that breathe


@MODES
@POLICIES
def test_requests_are_freed_without_the_garbage_collector(policy: str, is_async: bool) -> None:
    scheduler = make_scheduler(policy, is_async)
    serve(scheduler, 50, seed=1)
    gc.collect()
    gc.disable()
    try:
        serve(scheduler, 200, seed=2)
        assert gc.collect() == 0
    finally:
        gc.enable()
