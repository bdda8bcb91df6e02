"""A worker's times, measured over a grid, are those that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from engine_core import cli
from engine_core.config import EngineConfig
from engine_core.lab.latency import LatencyTable, StepShape, TableLatency, load_table, parse_latency
from engine_core.lab.profile import Grid, GridError, measure
from engine_core.lab.virtual_clock import VirtualClock
from executor.base import make_executor
from executor.batch_state import BatchState
from executor.mock_worker import MockWorker
from executor.step import ModelRunnerOutput, SchedulerOutput

CLOCK = VirtualClock()
MODEL = parse_latency("step_ms=3,prefill_us_per_token=20,decode_us_per_seq=100,kv_ns_per_token=500")


class TimedWorker(MockWorker):
    """Checks what it is told as the mock does, and takes virtual time."""

    steps: ClassVar[list[StepShape]] = []

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        self.steps.append(StepShape.of(step))
        CLOCK.advance_to(CLOCK.monotonic() + MODEL(self.steps[-1]))
        return super().execute_model(step, batch)


def profile(grid: Grid, **fields: object) -> LatencyTable:
    options = {"worker_options": {"mock_num_blocks": 400, "mock_max_model_len": 600}, **fields}
    config = EngineConfig(worker_cls=f"{__name__}:TimedWorker", max_num_seqs=16, max_num_batched_tokens=128)
    config = msgspec.structs.replace(config, **options)
    executor = make_executor(config.executor_config())
    try:
        return measure(executor, executor.initialize(), config, grid, CLOCK)
    finally:
        executor.shutdown()


def test_the_table_of_an_affine_worker_gives_its_times_back() -> None:
    grid = Grid([16, 100], [1, 3, 8], [16, 64, 240], repeats=2)
    table = profile(grid)
    assert np.array(table.step_s).shape == (3, 4, 3)
    model = TableLatency(table)
    for rows in ([(1, 100)] * 3, [(1, 50), (40, 0)], [(1, 200)] * 12, [(90, 32)], [(2, 20)]):
        counts, computed = (np.array([row[i] for row in rows], np.int32) for i in range(2))
        shape = StepShape.of(SchedulerOutput(1, np.arange(len(rows), dtype=np.int32), counts, computed))
        # But for the few tokens by which a context grows while it is measured.
        assert model(shape) == pytest.approx(MODEL(shape), rel=0.02)


def test_the_steps_are_those_of_the_grid() -> None:
    TimedWorker.steps.clear()
    profile(Grid([32], [2], [48], repeats=1))
    shapes = [(shape.prefill_tokens, shape.decode_seqs) for shape in TimedWorker.steps]
    context = [(48, 0)]
    assert shapes == context + [(32, 0)] * 2 + context * 2 + [(0, 2)] * 2 + [(32, 2)] * 2
    last = TimedWorker.steps[-1]
    assert last.num_computed_tokens.tolist()[-1] == 48


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        (([32], [16], [16]), "--max-num-seqs 17"),
        (([120], [10], [16]), "--max-num-batched-tokens 130"),
        (([32], [1], [590]), "exceed the model's 600"),
        (([32], [15], [560]), "KV blocks"),
        (([1], [1], [16]), "one token"),
        (([2], [1], [0]), "begin at 1"),
        (([-2], [1], [4]), "begin at 1"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(grid: tuple[list[int], ...], reason: str) -> None:
    with pytest.raises(GridError, match=reason):
        profile(Grid(*grid, repeats=1))


def test_the_command_writes_a_table_that_simulate_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    axes = ("--prefill-tokens", "16", "--decode-seqs", "1,2", "--context", "16", "--repeats", "1")
    assert cli.main(["profile-worker", str(path), *axes]) == 0
    assert "prompt tokens" in capsys.readouterr().out
    assert load_table(path)
    assert cli.main(["simulate", "--rate", "5", "--num-requests", "5", "--latency", str(path)]) == 0
    for wrong in (["table.txt"], [str(path), "--context", "x"], [str(path), "--context", "0"]):
        with pytest.raises(SystemExit):
            cli.main(["profile-worker", *wrong])
