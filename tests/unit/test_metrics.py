"""What is measured of requests and steps, and the Prometheus series made of it."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from engine_core.config import ConfigError
from engine_core.counters import Counters
from engine_core.metrics import (
    INTER_TOKEN_LATENCY,
    TIME_TO_FIRST_TOKEN,
    EngineMetrics,
    Histogram,
    request_tokens_bounds,
)
from engine_core.monitoring import MonitoringServer
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.adapters import AdapterCounts
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest
from transport.message_queue import QueueStats
from transport.state_page import StatePage

prometheus_parser = pytest.importorskip("prometheus_client.parser")
from engine_core.prometheus import EngineCollector, process_registry, renderer  # noqa: E402  # needs the package

UNIX = 1.7e9


def request(prompt: int = 10, **kwargs: object) -> Request:
    return Request("r", np.zeros(prompt, np.int32), SamplingParams(max_tokens=7), arrival_time=UNIX, **kwargs)  # type: ignore[arg-type]


def slots(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(slots, np.int32)


def in_bucket(histogram: Histogram, value: float) -> int:
    """How many observations share the bucket of `value`."""
    probe = Histogram(histogram.bounds)
    probe.observe(value)
    return histogram.counts[probe.counts.index(1)]


def generate(request: Request, count: int) -> None:
    request.output += np.zeros(count, np.int32).tobytes()


# Recording


def test_a_histogram_bound_belongs_to_its_bucket() -> None:
    one, many = Histogram((1, 2, 5)), Histogram((1, 2, 5))
    values = [0.5, 1.0, 1.5, 2.0, 5.0, 5.1, 100.0]
    for value in values:
        one.observe(value)
    many.observe_all(np.array(values))
    assert one.counts == many.counts == [2, 2, 1, 2]
    assert one.total == many.total == sum(values)


def test_token_bounds_are_1_2_5_up_to_the_model_length() -> None:
    assert request_tokens_bounds(1) == (1,)
    assert request_tokens_bounds(200) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert request_tokens_bounds(199) == (1, 2, 5, 10, 20, 50, 100)


def test_a_finished_requests_phases_are_told_apart() -> None:
    metrics, one = EngineMetrics(4, 1000), request(10)
    one.num_cached_tokens = 4
    metrics.queued(one, 100.0)
    one.slot = 2
    metrics.scheduled(one, 100.6)
    metrics.first_token(one, 101.7, UNIX + 2)
    for now in (102.0, 102.5, 105.7):
        metrics.tokens(slots(2), now)
    generate(one, 4)
    one.finish_reason = FinishReason.LENGTH
    metrics.ended(one, 2, UNIX + 6)
    expected = [
        (metrics.queue_s, 0.6),
        (metrics.prefill_s, 1.1),
        (metrics.decode_s, 4.0),
        (metrics.inference_s, 5.1),
        (metrics.end_to_end_s, 6.0),
        (metrics.time_to_first_token_s, 2.0),
        (metrics.time_per_output_token_s, 4.0 / 3),
        (metrics.prompt_tokens, 10),
        (metrics.generation_tokens, 4),
        (metrics.prefill_kv_computed, 6),
        (metrics.max_tokens_parameter, 7),
        (metrics.num_preemptions, 0),
    ]
    for histogram, value in expected:
        assert histogram.total == pytest.approx(value)
        assert sum(histogram.counts) == 1
    assert metrics.inter_token_s.total == pytest.approx(4.0)
    assert sum(metrics.inter_token_s.counts) == 3
    assert metrics.finished[FinishReason.LENGTH] == 1


def test_a_request_that_ends_before_its_first_token_has_no_phases() -> None:
    metrics, one = EngineMetrics(4, 1000), request()
    metrics.queued(one, 100.0)
    one.finish_reason = FinishReason.ABORT
    metrics.ended(one, None, UNIX + 6)
    assert metrics.finished[FinishReason.ABORT] == 1
    assert metrics.end_to_end_s.total == 6.0
    assert not any(metrics.queue_s.counts)
    assert not any(metrics.decode_s.counts)


def test_token_gaps_are_those_of_each_request() -> None:
    metrics = EngineMetrics(8, 1000)
    for slot, first in ((1, 10.0), (4, 10.0), (6, 10.3)):
        one = request()
        metrics.queued(one, 0.0)
        one.slot = slot
        metrics.scheduled(one, 0.0)
        metrics.first_token(one, first, UNIX)
    metrics.tokens(slots(1, 4), 10.02)
    assert in_bucket(metrics.inter_token_s, 0.02) == 2
    metrics.tokens(slots(4, 6, 1), 10.4)
    assert in_bucket(metrics.inter_token_s, 0.38) == 2
    assert in_bucket(metrics.inter_token_s, 0.1) == 1
    assert metrics.inter_token_s.total == pytest.approx(2 * 0.02 + 2 * 0.38 + 0.1)
    metrics.tokens(slots(), 11.0)


def test_a_preemption_lengthens_the_gap_between_tokens_and_keeps_the_first_schedule() -> None:
    metrics, one = EngineMetrics(4, 1000), request()
    metrics.queued(one, 1.0)
    one.slot = 0
    metrics.scheduled(one, 2.0)
    metrics.first_token(one, 3.0, UNIX)
    metrics.preempted(one)
    one.slot = -1
    metrics.stale_token(one, 3.5)  # of a step that was in flight
    one.slot = 3  # another than before
    metrics.scheduled(one, 7.0)
    metrics.tokens(slots(3), 8.0)
    assert metrics.inter_token_s.total == pytest.approx(0.5 + 4.5)
    generate(one, 3)
    one.finish_reason = FinishReason.STOP
    metrics.ended(one, 3, UNIX)
    assert metrics.queue_s.total == 1.0
    assert metrics.inference_s.total == 6.0


def test_adapters_of_live_requests_are_counted() -> None:
    counts = AdapterCounts()
    poet, painter = (request(lora=LoRARequest(name, i, "/")) for i, name in enumerate(("poet", "painter"), 1))
    for one in (poet, painter, request()):
        counts.queued(one)
    assert counts.waiting == {"poet": 1, "painter": 1}
    counts.scheduled(poet)
    counts.scheduled(painter)
    counts.preempted(painter)
    assert (counts.waiting, counts.running) == ({"painter": 1}, {"poet": 1})
    counts.ended(poet, was_running=True)
    counts.ended(painter, was_running=False)
    assert (counts.waiting, counts.running) == ({}, {})


# Series


class Engine(NamedTuple):
    page: StatePage
    counters: Counters
    metrics: EngineMetrics
    collector: EngineCollector


def queues() -> Mapping[str, QueueStats]:
    stats = QueueStats(
        messages=5, payload_bytes=600, waits=2, parks=1, wakes=1, waited_s=0.25, longest_wait_s=0.2
    )
    return {"steps": stats}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with StatePage.create(num_ranks=2) as page:
        page.engine.claim()
        page.engine.phase = "ready"
        counters, metrics = Counters(), EngineMetrics(4, 100)
        collector = EngineCollector(
            page.view,
            counters,
            metrics,
            model_name="mock",
            engine_index=3,
            cache_config={"block_size": 16, "num_gpu_blocks": 100, "enable_prefix_caching": True},
            max_loras=2,
            adapters=AdapterCounts(),
            queues=queues,
        )
        yield Engine(page, counters, metrics, collector)


def render_of(engine: Engine) -> Callable[[str], tuple[str, bytes]]:
    registry = process_registry()
    registry.register(engine.collector)
    return renderer(registry)


def scrape(engine: Engine) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name to labels to value."""
    _, text = render_of(engine)("")
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in prometheus_parser.text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def only(samples: dict[tuple[tuple[str, str], ...], float]) -> float:
    (value,) = samples.values()
    return value


# vLLM 0.33: series and labels besides model_name and engine, of those that concern an engine of text
# generation.
VLLM_SERIES: dict[str, set[str]] = {
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:engine_sleep_state": {"sleep_state"},
    "vllm:kv_cache_usage_perc": set(),
    "vllm:prefix_cache_queries_total": set(),
    "vllm:prefix_cache_hits_total": set(),
    "vllm:num_preemptions_total": set(),
    "vllm:prompt_tokens_total": set(),
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:prompt_tokens_cached_total": set(),
    "vllm:prompt_tokens_cached_by_source_total": {"source"},
    "vllm:generation_tokens_total": set(),
    "vllm:request_success_total": {"finished_reason"},
    **{
        f"vllm:{name}_{part}": {"le"} if part == "bucket" else set()
        for name in (
            "request_prompt_tokens",
            "request_generation_tokens",
            "iteration_tokens_total",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_num_preemptions",
            "request_prefill_kv_computed_tokens",
        )
        for part in ("bucket", "sum", "count")
    },
}


def test_vllms_series_are_there_under_their_names_with_their_labels(engine: Engine) -> None:
    samples = scrape(engine)
    for name, labels in VLLM_SERIES.items():
        assert name in samples
        for found in samples[name]:
            assert {key for key, _ in found} == labels | {"model_name", "engine"}, name
            assert {("model_name", "mock"), ("engine", "3")} <= set(found)
    reasons = {dict(labels)["finished_reason"] for labels in samples["vllm:request_success_total"]}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}
    (info,) = samples["vllm:cache_config_info"]
    assert dict(info) == {
        "block_size": "16",
        "num_gpu_blocks": "100",
        "enable_prefix_caching": "True",
        "engine": "3",
    }
    assert {dict(labels)["reason"] for labels in samples["vllm:admission_rejections_total"]} == {
        "max_num_queued_reqs",
        "max_num_queued_tokens",
    }


def test_gauges_show_the_page_and_counters_the_counters(engine: Engine) -> None:
    engine.page.engine.progress(
        step_id=9,
        last_progress_s=0.0,
        in_flight=2,
        running=7,
        waiting=3,
        deferred=1,
        requests_admitted=0,
        requests_finished=0,
        blocks_free=75,
        blocks_used=25,
        blocks_cached=10,
        prefix_requests=0,
        prefix_queries=0,
        prefix_hits=0,
        prompt_tokens=0,
        cached_tokens=0,
        generation_tokens=0,
        preemptions=0,
    )
    engine.page.engine.sleep_level = 1
    engine.page.engine.restarts = 4
    engine.page.rank(1).begin_step(1, 1, 0.5)
    engine.page.rank(1).end(1.0)
    engine.counters.prompt_tokens = 100
    engine.counters.cached_tokens = 30
    engine.counters.generation_tokens = 55
    engine.counters.refused_by_tokens = 2
    samples = scrape(engine)
    assert only(samples["vllm:num_requests_running"]) == 7
    assert only(samples["vllm:num_requests_waiting"]) == 4
    by_reason = samples["vllm:num_requests_waiting_by_reason"]
    assert {dict(labels)["reason"]: value for labels, value in by_reason.items()} == {
        "capacity": 3,
        "deferred": 1,
    }
    assert only(samples["vllm:kv_cache_usage_perc"]) == 0.25
    sleep = {
        dict(labels)["sleep_state"]: value for labels, value in samples["vllm:engine_sleep_state"].items()
    }
    assert sleep == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    assert only(samples["vllm:prompt_tokens_total"]) == 100
    sources = samples["vllm:prompt_tokens_by_source_total"]
    assert {dict(labels)["source"]: value for labels, value in sources.items()} == {
        "local_compute": 70,
        "local_cache_hit": 30,
        "external_kv_transfer": 0,
    }
    assert only(samples["vllm:generation_tokens_total"]) == 55
    assert sorted(samples["vllm:admission_rejections_total"].values()) == [0, 2]
    assert only(samples["engine_core:restarts_total"]) == 4
    assert only(samples["engine_core:steps_in_flight"]) == 2
    assert only(samples["engine_core:queue_wait_seconds_total"]) == 0.25
    assert sorted(samples["engine_core:rank_steps_total"].values()) == [0, 1]
    assert "process_resident_memory_bytes" in samples


def test_histograms_are_cumulative_with_vllms_bounds(engine: Engine) -> None:
    engine.metrics.inter_token_s.observe(0.03, 256)
    engine.metrics.inter_token_s.observe(1000.0)
    engine.metrics.step(300, 1.0, 1.001, 1.003, 1.013, 1.016)
    engine.metrics.output(0.004)
    engine.metrics.step(0, 2.0, 2.001, 2.001, 2.001, 2.001)
    samples = scrape(engine)
    buckets = {
        float(dict(labels)["le"]): value
        for labels, value in samples["vllm:inter_token_latency_seconds_bucket"].items()
    }
    assert list(buckets) == [*INTER_TOKEN_LATENCY, float("inf")]
    assert (buckets[0.025], buckets[0.05], buckets[80.0], buckets[float("inf")]) == (0, 256, 256, 257)
    assert only(samples["vllm:inter_token_latency_seconds_sum"]) == pytest.approx(256 * 0.03 + 1000)
    first = samples["vllm:time_to_first_token_seconds_bucket"]
    assert [float(dict(labels)["le"]) for labels in first][:-1] == list(TIME_TO_FIRST_TOKEN)
    assert only(samples["vllm:iteration_tokens_total_sum"]) == 300
    assert only(samples["engine_core:step_duration_seconds_count"]) == 2
    stages = samples["engine_core:step_stage_seconds_total"]
    assert {dict(labels)["stage"]: round(value, 9) for labels, value in stages.items()} == {
        "schedule": 0.002,
        "broadcast": 0.002,
        "execute": 0.01,
        "update": 0.003,
        "output": 0.004,
    }


def test_a_torn_page_is_still_scraped(engine: Engine) -> None:
    engine.page.rank(0).words[0] += 1
    assert "vllm:num_requests_running" in scrape(engine)


# Over HTTP


class Site:
    def __init__(self, stack: ExitStack, engine: Engine) -> None:
        self.server = MonitoringServer("127.0.0.1", 0, engine.page.view, render_of(engine))
        self.server.start()
        stack.callback(self.server.close)

    def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, response.headers["Content-Type"], body


@pytest.fixture
def site(engine: Engine) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, engine)


def test_metrics_are_served_as_text_or_openmetrics(site: Site) -> None:
    status, content_type, body = site.get("/metrics")
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    assert 'vllm:num_requests_running{engine="3",model_name="mock"} 0.0' in body
    _, content_type, body = site.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_health_is_served_with_a_reason(site: Site, engine: Engine) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health/progress"):
        assert site.get(path)[0] == 200
    engine.page.engine.pause = "frozen"
    status, _, body = site.get("/health/ready")
    assert (status, body) == (503, "the scheduler is paused (frozen): resume it\n")
    assert site.get("/health/live/?x=1")[0] == 200
    status, _, body = site.get("/nowhere")
    assert status == 404
    assert "/health/progress" in body


def test_an_address_in_use_is_named(site: Site, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=rf"metrics_port = {site.server.port}: cannot listen on 127.0.0.1"):
        MonitoringServer("127.0.0.1", site.server.port, engine.page.view, render_of(engine))


def test_a_server_can_be_closed_twice_or_before_it_serves(site: Site, engine: Engine) -> None:
    site.server.close()
    site.server.close()
    MonitoringServer("127.0.0.1", 0, engine.page.view, render_of(engine)).close()


def test_the_dashboard_reads_series_that_there_are(engine: Engine) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    read = {name for query in queries for name in re.findall(r"(?:vllm|engine_core):\w+", query)}
    assert len(read) > 20
    assert read <= scrape(engine).keys()
