"""Our decisions are those that were recorded of vLLM 0.33.0, in every field of every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.scheduler.scheduler import Scheduler
from tests import golden

FILES = sorted(golden.DIRECTORY.glob("*.jsonl.gz"))


def name(path: Path) -> str:
    return path.name.partition(".")[0]


def assert_sound(scheduler: Scheduler) -> None:
    assert scheduler.check() == []


def test_all_recordings_are_here() -> None:
    assert len(FILES) == 44


@pytest.mark.parametrize("path", FILES, ids=name)
def test_decisions_are_vllms(path: Path) -> None:
    workload, expected = golden.load(path)
    assert golden.differences(expected, golden.run(workload)) == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_decisions_are_vllms_planned_in_order(path: Path) -> None:
    """The loop over requests decides like the columns, with the accounts right after every step."""
    workload, expected = golden.load(path)
    scheduler = golden.make_scheduler(workload["config"])
    scheduler.by_columns = False
    assert golden.differences(expected, golden.run(workload, assert_sound, scheduler)) == []
