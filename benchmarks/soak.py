"""Mixed traffic with aborts, vanishing clients and restarts for a long time: memory, descriptors and threads
of the engine must stay as they are.

python -m benchmarks.soak [--minutes 30] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine_core.chaos.campaign import Campaign, Settings, kinds_named
from engine_core.chaos.report import Report, table

KINDS = kinds_named(["kill_rank", "raise", "abort", "kill_client", "slow", "stop_client", "rubbish"])
REQUESTS_PER_ROUND = 400
GROWTH_ALLOWED_MB = 16.0  # the allocator's mood


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    requests: int
    rss_mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int, at_s: float, requests: int) -> Sample:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            round(at_s, 1),
            requests,
            round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
        )


async def soak(seconds: float, seed: int) -> tuple[Report, list[Sample]]:
    """Returns the report, and a sample of the engine after each round, all clients idle."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(seed=seed, kinds=KINDS, engine_log=Path(directory) / "engine.log")
        async with Campaign(settings) as campaign:
            begun = time.monotonic()
            while time.monotonic() - begun < seconds:
                await campaign.run(seed + len(samples), 1, REQUESTS_PER_ROUND)
                at_s = time.monotonic() - begun
                samples.append(Sample.of(campaign.engine_pid, at_s, campaign.num_requests))
            return await campaign.finish(), samples


def growth(samples: list[Sample]) -> list[str]:
    """What has grown between the second fifth and the last; empty if nothing has."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    grown = []
    if min(s.rss_mb for s in late) > max(s.rss_mb for s in early) + GROWTH_ALLOWED_MB:
        grown.append(f"memory: {early[0].rss_mb} MB early, {late[-1].rss_mb} MB late")
    for name in ("descriptors", "threads"):
        before, after = (min(getattr(s, name) for s in part) for part in (early, late))
        if after > before:
            grown.append(f"{name}: {before} early, {after} late")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report, samples = asyncio.run(soak(args.minutes * 60, args.seed))
    for sample in samples[:: max(1, len(samples) // 30)]:
        print(
            f"{sample.at_s:8.1f} s  {sample.requests:8,} requests  {sample.rss_mb:7.1f} MB  "
            f"{sample.descriptors:4} descriptors  {sample.threads:3} threads"
        )
    print(table(report))
    grown = growth(samples)
    for line in grown:
        print(f"GROWN: {line}")
    return 0 if report.ok and not grown else 1


if __name__ == "__main__":
    sys.exit(main())
