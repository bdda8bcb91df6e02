"""A scheduler class of the user's own, and the one in the examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.config import ConfigError, EngineConfig
from engine_core.lab.latency import parse_latency
from engine_core.lab.load import GeneratedLoad, parse_lengths
from engine_core.lab.simulation import Simulation
from engine_core.replay.traces import TraceRequest
from engine_core.scheduler.plug_in import scheduler_class
from engine_core.scheduler.scheduler import Scheduler
from examples.shortest_prefill_scheduler import AGEING, ShortestPrefillScheduler
from executor.base import EngineCapacity

EXAMPLE = "examples.shortest_prefill_scheduler:ShortestPrefillScheduler"
LATENCY = parse_latency("step_ms=5,prefill_us_per_token=20")


def simulate(
    load: list[TraceRequest], blocks: int = 10_000, **fields: object
) -> tuple[Simulation, list[int]]:
    """The simulation, and the rows in the order of their first tokens."""
    rows: list[tuple[float, int]] = []
    done = Simulation(
        EngineConfig(log_stats=False, **fields),  # type: ignore[arg-type]
        EngineCapacity(blocks, 32000, 1 << 17, "float32"),
        LATENCY,
        on_result=lambda result: rows.append((result.first_token_s or 0.0, result.row)),
    )
    done.run(load)
    assert not done.engines[0].core.scheduler.check()
    return done, [row for _, row in sorted(rows)]


def test_a_class_is_found_by_its_name() -> None:
    assert scheduler_class(EngineConfig()) is Scheduler
    assert scheduler_class(EngineConfig(scheduler_cls=EXAMPLE)) is ShortestPrefillScheduler


@pytest.mark.parametrize(
    "name", ["nonsense", "no.such.module:Class", "examples.shortest_prefill_scheduler:Nobody", "json:loads"]
)
def test_what_is_no_scheduler_class_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        scheduler_class(EngineConfig(scheduler_cls=name))
    assert error.value.field == "scheduler_cls"


def test_shorter_prompts_go_first() -> None:
    lengths = [3000, 2500, 100, 1800, 50]
    load = [TraceRequest(row, 0.0, length, 1) for row, length in enumerate(lengths)]
    _, order = simulate(load, scheduler_cls=EXAMPLE)
    assert (sorted(order[:3]), order[3:]) == ([2, 3, 4], [1, 0])  # the first three share a step
    assert simulate(load)[1] == [0, 1, 2, 3, 4]


def test_a_cached_prefix_counts_as_computed() -> None:
    first = TraceRequest(0, 0.0, 2048, 1, [1, 2, 3, 4])
    load = [first, TraceRequest(1, 1.0, 600, 1, [9, 8]), TraceRequest(2, 1.0, 2060, 1, [1, 2, 3, 4, 5])]
    assert simulate(load, scheduler_cls=EXAMPLE, max_num_seqs=1)[1] == [0, 2, 1]


def test_a_long_prompt_does_not_starve() -> None:
    long = TraceRequest(0, 0.01, 4000, 1)
    stream = [TraceRequest(1 + index, 0.04 * index, 2000, 1) for index in range(400)]  # fill the engine
    load = sorted([long, *stream], key=lambda request: request.arrival_s)
    _, order = simulate(load, scheduler_cls=EXAMPLE, max_num_seqs=1)
    waited_for = order.index(0)
    assert 5 < waited_for < 60 + (4000 - 2000) / AGEING / 0.04


def test_preempted_requests_come_back() -> None:
    load = GeneratedLoad(
        rate=100.0,
        num_requests=150,
        input_lengths=parse_lengths("uniform:10:400"),
        output_lengths=parse_lengths("uniform:50:200"),
    )
    done, order = simulate(list(load), blocks=300, scheduler_cls=EXAMPLE)
    report = done.report("x")
    assert len(order) == 150 and report.completed == 150
    assert report.preemptions


def test_the_example_is_short() -> None:
    assert len(Path("examples/shortest_prefill_scheduler.py").read_text().splitlines()) < 80
