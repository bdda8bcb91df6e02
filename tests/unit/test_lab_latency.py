"""Latency models, and the clock and workers of a simulation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine_core.lab.latency import (
    TABLE_FORMAT,
    LatencyError,
    LatencyTable,
    StepShape,
    TableLatency,
    load_table,
    parse_latency,
)
from engine_core.lab.timeline import MOST_BUCKETS, Timeline
from engine_core.lab.virtual_clock import VirtualClock
from executor.step import SchedulerOutput


def shape(*rows: tuple[int, int]) -> StepShape:
    """Of a step whose rows compute `rows[i][0]` tokens after `rows[i][1]`."""
    counts, computed = (np.array([row[i] for row in rows], np.int32) for i in range(2))
    return StepShape.of(SchedulerOutput(1, np.arange(len(rows), dtype=np.int32), counts, computed))


def twice_the_rows(step: StepShape) -> float:
    return 2.0 * len(step.num_scheduled_tokens)


def backwards(step: StepShape) -> float:
    return -1.0


def test_a_steps_shape_tells_prefill_from_decode_and_counts_what_is_read() -> None:
    it = shape((1, 99), (1, 49), (30, 20))
    assert (it.prefill_tokens, it.decode_seqs, it.kv_tokens) == (30, 2, 100 + 50 + 50)


def test_the_affine_model_adds_its_terms() -> None:
    model = parse_latency("step_ms=5,prefill_us_per_token=20, decode_us_per_seq=30,kv_ns_per_token=100")
    assert model(shape((1, 99), (1, 49), (30, 20))) == pytest.approx(5e-3 + 600e-6 + 60e-6 + 20e-6)
    assert parse_latency("step_ms=2")(shape((30, 0))) == 2e-3


@pytest.mark.parametrize("text", ["step_ms=x", "step=3", "step_ms=-1", "step_ms=nan", "mod.fn", "os:nothing"])
def test_a_model_that_cannot_be_had_is_refused(text: str) -> None:
    with pytest.raises(LatencyError):
        parse_latency(text)


def test_a_callable_is_a_model_and_must_return_seconds() -> None:
    assert parse_latency(f"{__name__}:twice_the_rows")(shape((1, 5), (1, 5))) == 4.0
    with pytest.raises(LatencyError, match=r"returned -1\.0"):
        parse_latency(f"{__name__}:backwards")(shape((1, 5)))


def _table(**changes: object) -> LatencyTable:
    axes = {"prefill_tokens": [0, 10, 100], "decode_seqs": [0, 4], "context": [0, 100]}
    times = [
        [[p + 10 * d + 0.01 * c for c in axes["context"]] for d in axes["decode_seqs"]] for p in (0, 10, 100)
    ]
    table = LatencyTable(format=TABLE_FORMAT, worker_cls="w", model="m", step_s=times, **axes)
    return msgspec.structs.replace(table, **changes)


def test_a_table_interpolates_and_goes_on_straight() -> None:
    model = TableLatency(_table())
    for rows in ([(10, 0)], [(10, 90)] * 3, [(1, 49)] * 4, [(1, 9), (55, 40)], [(1, 999)] * 9, [(300, 700)]):
        it = shape(*rows)
        expected = it.prefill_tokens + 10 * it.decode_seqs + 0.01 * sum(row[1] for row in rows) / len(rows)
        assert model(it) == pytest.approx(expected)
    assert model(shape()) == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"context": [0, 50, 100]},
        {"decode_seqs": [4, 0]},
        {"step_s": [[[0.0, 1.0]], [[1.0]], [[2.0]]]},
        {"step_s": [[[-1.0, 1.0]] * 2] * 3},
        {"step_s": []},
        {"format": "other"},
    ],
)
def test_a_file_that_holds_no_grid_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(msgspec.json.encode(_table(**changes)))
    with pytest.raises(LatencyError, match=r"table\.json"):
        load_table(path)
    path.write_text("{}")
    with pytest.raises(LatencyError, match="no latency table"):
        load_table(path)


def test_the_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock.monotonic() == clock.time() == 2.0


def test_a_timeline_keeps_its_sums_when_it_merges_buckets() -> None:
    rng = np.random.default_rng(3)
    timeline = Timeline(("level", "events"))
    now_s, area, events = 0.0, 0.0, 0
    for _ in range(5000):
        until_s = now_s + float(rng.exponential(1.0))
        level = float(rng.integers(0, 9))
        timeline.spread(now_s, until_s, (level,))
        timeline.count(until_s, (1.0,), first=1)
        area += level * (until_s - now_s)
        events += 1
        now_s = until_s
    assert timeline.sums("level").sum() == pytest.approx(area)
    assert timeline.sums("events").sum() == events
    starts = timeline.starts_s()
    assert len(starts) == len(timeline.sums("level")) <= MOST_BUCKETS
    assert starts[-1] <= now_s < starts[-1] + 2 * timeline.width_s
    assert (timeline.sums("level") <= 8 * timeline.width_s + 1e-9).all()
