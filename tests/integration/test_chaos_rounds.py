"""Seeded chaos: traffic is served right while ranks, clients and bytes go wrong, and nothing is left.

A round that failed is run again alone with `CHAOS_SEED=<seed> pytest ...`; `engine-core chaos` does the same
from the command line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_core.chaos.campaign import Campaign, Settings
from engine_core.chaos.report import Report, table
from engine_core.replay.traces import load_trace

TRACE = Path(__file__).parent.parent / "data" / "traces" / "mooncake_conversation_200.jsonl"


async def rounds(settings: Settings, count: int, faults: int, requests: int) -> Report:
    first = int(os.environ.get("CHAOS_SEED", settings.seed))
    async with Campaign(settings) as campaign:
        for seed in range(first, first + (1 if "CHAOS_SEED" in os.environ else count)):
            print(f"seed {seed}")
            await campaign.run(seed, faults, requests)
        return await campaign.finish()


async def test_10_rounds_with_two_ranks_and_recorded_traffic(tmp_path: Path) -> None:
    settings = Settings(seed=1, trace=load_trace(TRACE), engine_log=tmp_path / "engine.log")
    report = await rounds(settings, 10, faults=2, requests=30)
    assert report.ok, table(report)


async def test_10_rounds_with_one_rank_and_generated_traffic(tmp_path: Path) -> None:
    settings = Settings(seed=500, num_ranks=1, engine_log=tmp_path / "engine.log")
    report = await rounds(settings, 10, faults=1, requests=30)
    assert report.ok, table(report)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 10_000), (3, 20_000)])
async def test_100_rounds(num_ranks: int, seed: int, tmp_path: Path) -> None:
    trace = load_trace(TRACE) if num_ranks == 2 else None
    settings = Settings(seed=seed, num_ranks=num_ranks, trace=trace, engine_log=tmp_path / "engine.log")
    report = await rounds(settings, 100, faults=3, requests=60)
    assert report.ok, table(report)
