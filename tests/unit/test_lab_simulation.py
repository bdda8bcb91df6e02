"""Simulations: repeatable, exact where a hand can calculate, and never stuck."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Sequence
from itertools import islice

import msgspec
import numpy as np
import pytest

from engine_core.config import EngineConfig
from engine_core.lab.latency import LatencyModel, parse_latency
from engine_core.lab.load import GeneratedLoad, parse_lengths
from engine_core.lab.metrics import RequestResult, SimulationReport, Slo, table, weighted_percentiles
from engine_core.lab.routing import EngineView, RoutingError, RoutingPolicy, parse_routing
from engine_core.lab.simulation import Simulation
from engine_core.replay.prefix import unbounded_prefix_hits
from engine_core.replay.report import Percentiles
from engine_core.replay.traces import TraceRequest, load_trace
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.base import EngineCapacity

TRACE = "tests/data/traces/mooncake_conversation_200.jsonl"
LATENCY = "step_ms=5,prefill_us_per_token=20,decode_us_per_seq=20,kv_ns_per_token=10"


def simulation(
    *, blocks: int = 1 << 16, latency: str | LatencyModel = LATENCY, **options: object
) -> tuple[Simulation, list[RequestResult]]:
    config = {"log_stats": False}
    kept = {}
    for name, value in options.items():
        (config if name in EngineConfig.__struct_fields__ else kept)[name] = value  # type: ignore[assignment]
    results: list[RequestResult] = []
    model = parse_latency(latency) if isinstance(latency, str) else latency
    capacity = EngineCapacity(blocks, 32000, 1 << 17, "float32")
    done = Simulation(EngineConfig(**config), capacity, model, on_result=results.append, **kept)  # type: ignore[arg-type]
    return done, results


def run(
    load: Sequence[TraceRequest] | GeneratedLoad, **options: object
) -> tuple[SimulationReport, list[RequestResult]]:
    sim, results = simulation(**options)  # type: ignore[arg-type]
    sim.run(load)
    for engine in sim.engines:
        assert not engine.core.scheduler.check()
        assert engine.core.scheduler.kv.pool.usage == 0
    return sim.report("x"), results


def generated(num_requests: int = 300, **changes: object) -> GeneratedLoad:
    options: dict[str, object] = {
        "rate": 20.0,
        "num_requests": num_requests,
        "input_lengths": parse_lengths("lognormal:300:1"),
        "output_lengths": parse_lengths("uniform:1:40"),
    }
    return GeneratedLoad(**{**options, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_lone_requests_times_are_those_of_its_steps(async_scheduling: bool) -> None:
    one = TraceRequest(0, 0.0, 5000, 4)
    latency = "step_ms=3,prefill_us_per_token=10,decode_us_per_seq=100"
    report, [result] = run([one], latency=latency, async_scheduling=async_scheduling)
    # Chunks of 2048, 2048 and 904 tokens, then three steps that decode.
    assert result.ttft_ms == pytest.approx(3 * 3 + 5000 * 0.01)
    assert result.mean_itl_ms == pytest.approx(3.1)
    assert result.e2e_ms == pytest.approx(59 + 3 * 3.1)
    assert report.engine_steps is not None and report.engine_steps >= 6
    assert (report.completed, report.output_tokens, report.prefix_hit_tokens) == (1, 4, 0)


def test_an_arrival_during_a_step_joins_as_late_as_in_the_engine() -> None:
    pair = [TraceRequest(0, 0.0, 16, 100), TraceRequest(1, 0.0105, 16, 1)]
    first = {}
    for is_async in (False, True):
        _, results = run(pair, latency="step_ms=10", async_scheduling=is_async)
        first[is_async] = next(result.ttft_ms for result in results if result.row == 1)
    # It arrives in the second step, and runs in the third; or, if that one is planned already, in the fourth.
    assert first[False] == pytest.approx(19.5)
    assert first[True] == pytest.approx(29.5)


def test_two_simulations_are_identical_to_the_byte() -> None:
    def everything() -> tuple[bytes, bytes]:
        report, results = run(
            generated(shared_prefix_ratio=0.5, prefix_groups=3, seed=4),
            blocks=400,
            num_engines=2,
            routing=parse_routing("prefix-aware"),
            slo=Slo(200.0, 20.0),
        )
        return msgspec.json.encode(report), msgspec.json.encode(results)

    assert everything() == everything()


@pytest.mark.parametrize("block_size", [16, 512])
@pytest.mark.parametrize("budget", [2048, 1 << 18])
def test_an_unbounded_cache_hits_what_an_independent_calculation_says(block_size: int, budget: int) -> None:
    trace = load_trace(TRACE)
    report, results = run(trace, blocks=1 << 18, block_size=block_size, max_num_batched_tokens=budget)
    hits = unbounded_prefix_hits(trace, block_size)
    assert {result.row: result.cached_tokens for result in results} == dict(enumerate(hits))
    assert report.prefix_hit_tokens == sum(hits) > 0
    assert report.completed == report.requests == len(trace)


def test_smaller_caches_hit_less_and_smallest_ones_preempt() -> None:
    load = list(generated(shared_prefix_ratio=0.6, prefix_groups=40, rate=60.0))
    reports = [run(load, blocks=blocks)[0] for blocks in (500, 4_000, 40_000)]
    hits = [report.prefix_hit_tokens for report in reports]
    assert hits == sorted(hits) and hits[0] < hits[-1]
    assert reports[0].preemptions and not reports[-1].preemptions
    assert all(report.completed == len(load) for report in reports)


def test_what_can_never_fit_is_counted_and_the_others_are_served() -> None:
    load = [
        TraceRequest(0, 0.0, 50, 5),
        TraceRequest(1, 0.0, 5000, 5),  # more than the pool
        TraceRequest(2, 0.0, 1 << 17, 5),  # more than the model
        TraceRequest(3, 0.1, 100, 500),  # its output outgrows the pool
    ]
    report, results = run(load, blocks=32)
    assert (report.completed, report.failed, report.refused, report.unfinished) == (1, 3, 2, 0)
    assert {result.row: result.finish_reason for result in results} == {
        0: "length",
        1: "error",
        2: "error",
        3: "length",
    }
    assert any("whole KV cache holds 496" in reason for reason in report.failures)
    assert "can never fit" in table(report)


def test_a_scheduler_that_does_nothing_does_not_hang_the_simulation() -> None:
    sim, results = simulation()
    sim.engines[0].core.scheduler.pause_state = PauseState.PAUSED_NEW
    sim.engines[0].core.scheduler.__class__ = _AlwaysHopeful
    sim.run([TraceRequest(0, 0.0, 50, 5), TraceRequest(1, 1.0, 50, 5)])
    assert [result.finish_reason for result in results] == ["unfinished"] * 2
    assert sim.report("x").unfinished == 2


class _AlwaysHopeful(Scheduler):
    def has_requests(self) -> bool:
        return True


def test_waiting_requests_take_little_memory() -> None:
    sim, _ = simulation(latency="step_ms=1000", max_num_seqs=1)
    load = [TraceRequest(row, 0.0, 100_000, 1) for row in range(50)]
    engine = sim.engines[0]
    for request in load:
        engine.receive(request)
    assert all(not request.block_hashes for request in engine.live.values())
    assert all(request.prompt.strides == (0,) for request in engine.live.values())


def test_goodput_counts_the_requests_within_the_service_level() -> None:
    report, results = run(generated(), slo=Slo(ttft_ms=60.0, itl_ms=12.0), max_num_seqs=8)
    good = [r for r in results if r.ttft_ms is not None and r.ttft_ms <= 60 and (r.mean_itl_ms or 0) <= 12]
    assert 0 < len(good) < len(results)
    assert report.good_requests == len(good) == sum(result.good for result in results)
    assert report.goodput_per_s == pytest.approx(len(good) / report.wall_s, rel=1e-3)
    assert "goodput" in table(report)


def test_percentiles_of_counted_values_are_those_of_the_values() -> None:
    rng = np.random.default_rng(1)
    values, counts = rng.exponential(1.0, 57), rng.integers(1, 9, 57)
    whole = Percentiles.of(np.repeat(values, counts))
    assert weighted_percentiles(array("d", values), array("q", counts.tolist())) == whole
    assert weighted_percentiles(array("d"), array("q")) == Percentiles.of([])


class _Third(RoutingPolicy):
    def route(self, request: TraceRequest, engines: Sequence[EngineView]) -> int:
        return 2


class _Lost(RoutingPolicy):
    def route(self, request: TraceRequest, engines: Sequence[EngineView]) -> int:
        return 7


def _by_engine(results: list[RequestResult]) -> list[int]:
    return [sum(result.engine == index for result in results) for index in range(4)]


def test_policies_spread_requests_over_engines() -> None:
    load = list(islice(generated(seed=2), 200))
    _, results = run(load, num_engines=4, routing=parse_routing("round-robin"))
    assert _by_engine(results) == [50] * 4
    _, results = run(load, num_engines=4, routing=parse_routing("least-loaded"))
    assert min(_by_engine(results)) > 0 and sum(_by_engine(results)) == 200
    _, results = run(load, num_engines=4, routing=parse_routing(f"{__name__}:_Third"))
    assert _by_engine(results) == [0, 0, 200, 0]
    with pytest.raises(RoutingError, match="engine 7 of 4"):
        run(load, num_engines=4, routing=_Lost())
    for name in ("fastest", "json:loads", f"{__name__}:_Nobody"):
        with pytest.raises(RoutingError):
            parse_routing(name)


def test_a_prefix_aware_router_finds_the_engine_that_has_the_prefix() -> None:
    load = generated(shared_prefix_ratio=0.8, prefix_groups=12, rate=4.0)
    hits = {
        name: run(load, num_engines=4, blocks=600, routing=parse_routing(name))[0].prefix_hit_rate
        for name in ("round-robin", "prefix-aware")
    }
    assert hits["prefix-aware"] > 1.5 * hits["round-robin"]


def test_a_router_does_not_know_of_answers_before_they_are_there() -> None:
    sim, _ = simulation(latency="step_ms=100", num_engines=2, async_scheduling=False)
    busy = sim.engines[0]
    busy.receive(TraceRequest(0, 0.0, 10, 1))
    busy.step()  # answers at 0.1 s
    busy.hear_until(0.05)
    assert (busy.num_requests, busy.num_prompt_tokens) == (1, 10)
    busy.hear_until(0.1)
    assert (busy.num_requests, busy.num_prompt_tokens) == (0, 0)


def test_the_line_of_a_request_can_be_written_as_csv() -> None:
    _, results = run([TraceRequest(0, 0.0, 10, 2)])
    text = io.StringIO()
    csv.writer(text).writerow(msgspec.structs.astuple(results[0]))
    assert len(text.getvalue().split(",")) == len(RequestResult.__struct_fields__)
