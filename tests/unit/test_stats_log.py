"""The line about the engine that is logged now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from engine_core.stats_log import StatsLog
from transport.state_page import StatePage

ZERO = {
    "step_id": 0,
    "last_progress_s": 0.0,
    "in_flight": 0,
    "running": 0,
    "waiting": 0,
    "deferred": 0,
    "requests_admitted": 0,
    "requests_finished": 0,
    "blocks_free": 99,
    "blocks_used": 0,
    "blocks_cached": 0,
    "prefix_requests": 0,
    "prefix_queries": 0,
    "prefix_hits": 0,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "generation_tokens": 0,
    "preemptions": 0,
}


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Line:
    """Drives a page and a clock, and gives the line logged."""

    def __init__(self, page: StatePage, caplog: pytest.LogCaptureFixture) -> None:
        self._page = page
        self._caplog = caplog
        self._clock = ManualClock()
        self._log = StatsLog(page.view, engine_index=3, clock=self._clock)
        self._state: dict[str, float] = dict(ZERO)

    def after(self, seconds: float, **changes: float) -> tuple[str, str]:
        self._state |= changes
        self._page.engine.progress(**self._state)  # type: ignore[arg-type]
        self._clock.now += seconds
        self._caplog.clear()
        self._log.log()
        (record,) = self._caplog.records
        return record.levelname, record.getMessage()


@pytest.fixture
def line(caplog: pytest.LogCaptureFixture) -> Iterator[Line]:
    caplog.set_level(logging.DEBUG, "engine_core")
    with StatePage.create(num_ranks=0) as page:
        yield Line(page, caplog)


def test_the_line_has_vllms_content(line: Line) -> None:
    level, text = line.after(
        10.0,
        running=7,
        waiting=2,
        blocks_free=75,
        blocks_used=25,
        prompt_tokens=1300,
        cached_tokens=300,
        generation_tokens=505,
        prefix_requests=4,
        prefix_queries=800,
        prefix_hits=200,
    )
    assert level == "INFO"
    assert text == (
        "Engine 003: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.5 tokens/s, "
        "Running: 7 reqs, Waiting: 2 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )


def test_deferred_requests_and_preemptions_appear_when_there_are_some(line: Line) -> None:
    _, text = line.after(10.0, waiting=2, deferred=3, preemptions=4, generation_tokens=1)
    assert "Waiting: 5 reqs, Deferred: 3 reqs, Preemptions: 4, GPU KV" in text
    _, text = line.after(10.0, deferred=0, generation_tokens=2)
    assert "Deferred" not in text
    assert "Preemptions" not in text


def test_throughput_is_that_of_the_interval(line: Line) -> None:
    line.after(10.0, generation_tokens=1000)
    _, text = line.after(2.0, generation_tokens=1100)
    assert "Avg generation throughput: 50.0 tokens/s" in text


def test_an_idle_engine_is_silent_after_one_more_line(line: Line) -> None:
    levels = [line.after(10.0, generation_tokens=tokens)[0] for tokens in (0, 5, 5, 5, 6)]
    assert levels == ["DEBUG", "INFO", "INFO", "DEBUG", "INFO"]


def test_the_hit_rate_is_that_of_the_last_thousand_requests(line: Line) -> None:
    line.after(10.0, prefix_requests=900, prefix_queries=1000, prefix_hits=0)
    _, text = line.after(10.0, prefix_requests=1000, prefix_queries=2000, prefix_hits=1000)
    assert "hit rate: 50.0%" in text
    _, text = line.after(10.0, prefix_requests=1001, prefix_queries=2001, prefix_hits=1001)
    assert "hit rate: 100.0%" in text
    _, text = line.after(10.0)  # nothing new: the last ones still count
    assert "hit rate: 100.0%" in text
