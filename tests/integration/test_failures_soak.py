"""A minute of benchmarks/soak.py: nothing grows, however often ranks are restarted and clients vanish."""

from __future__ import annotations

import pytest

from benchmarks.soak import growth, soak
from engine_core.chaos.report import table


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_minute_of_traffic_and_restarts_leaves_nothing_grown() -> None:
    report, samples = await soak(60.0, seed=3)
    assert report.ok, table(report)
    assert growth(samples) == []
