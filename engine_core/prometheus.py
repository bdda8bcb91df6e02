"""The engine's state and metrics as Prometheus series: vLLM 0.33's names, labels and bounds, and some of our
own.

Everything is read when somebody scrapes: from the state page, the scheduler's counters and `EngineMetrics`;
nothing is kept here. Needs the prometheus_client package (`pip install 'engine-core[metrics]'`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from engine_core.counters import Counters
from engine_core.metrics import STAGES, EngineMetrics, Histogram
from engine_core.scheduler.adapters import AdapterCounts
from transport.clock import SYSTEM_CLOCK, Clock
from transport.message_queue import QueueStats
from transport.state_page import PageView

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by sleep level


class EngineCollector(Collector):
    """Makes the series of one engine."""

    def __init__(
        self,
        page: PageView,
        counters: Counters,
        metrics: EngineMetrics,
        *,
        model_name: str,
        engine_index: int = 0,
        cache_config: Mapping[str, object],
        max_loras: int = 0,
        adapters: AdapterCounts,
        queues: Callable[[], Mapping[str, QueueStats]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`cache_config` becomes the labels of `vllm:cache_config_info`. `queues` gives the engine's ends of
        the queues to and from its ranks, by name.
        """
        self._page = page
        self._counters = counters
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": str(engine_index)}
        self._cache_config = {key: str(value) for key, value in cache_config.items()}
        self._max_loras = max_loras
        self._adapters = adapters
        self._queues = queues
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        snapshot = self._page.snapshot()
        self._metrics.fold_steps()
        yield from self._state(snapshot["engine"])
        yield from self._totals()
        yield from self._requests()
        yield from self._own(snapshot["engine"], snapshot["ranks"])

    def _state(self, row: Mapping[str, object]) -> Iterator[Metric]:
        number: Mapping[str, int] = row  # type: ignore[assignment]  # the fields read here are numbers
        waiting, deferred = number["waiting"], number["deferred"]
        yield self._gauge(
            "vllm:num_requests_running", "Number of requests in model execution batches.", number["running"]
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", waiting + deferred
        )
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests: for capacity, or deferred by something other than capacity.",
            {"capacity": waiting, "deferred": deferred},
            "reason",
        )
        level = number["sleep_level"]
        yield self._gauge(
            "vllm:engine_sleep_state",
            "Sleep state of the engine: 1 for the state it is in, and for awake only if it does not sleep.",
            {state: int(level == state_level) for state_level, state in enumerate(SLEEP_STATES)},
            "sleep_state",
        )
        blocks = max(1, number["blocks_used"] + number["blocks_free"])
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            number["blocks_used"] / blocks,
        )
        info = {**self._cache_config, "engine": self._labels["engine"]}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache, as labels.", labels=list(info)
        )
        family.add_metric(list(info.values()), 1)
        yield family
        if self._max_loras:
            family = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Adapters of live requests, as labels; the value is the time.",
                labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
            )
            adapters = (self._adapters.waiting, self._adapters.running)
            family.add_metric(
                [str(self._max_loras), *(",".join(list(names)) for names in adapters)], self._clock.time()
            )
            yield family

    def _totals(self) -> Iterator[Metric]:
        count = self._counters
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", count.prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", count.prefix_hits)
        yield self._counter("vllm:num_preemptions", "Preemptions.", count.preemptions)
        yield self._counter("vllm:prompt_tokens", "Prefill tokens processed.", count.prompt_tokens)
        yield self._counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source.",
            {
                "local_compute": count.prompt_tokens - count.cached_tokens,
                "local_cache_hit": count.cached_tokens,
                "external_kv_transfer": 0,
            },
            "source",
        )
        yield self._counter("vllm:prompt_tokens_cached", "Cached prompt tokens.", count.cached_tokens)
        yield self._counter(
            "vllm:prompt_tokens_cached_by_source",
            "Tokens found in the prefix cache, by the tier that had them.",
            {"device": count.prefix_hits},
            "source",
        )
        yield self._counter("vllm:generation_tokens", "Generation tokens processed.", count.generation_tokens)
        family = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests refused by a queue limit, by limit.",
            labels=["model_name", "reason"],
        )
        for reason, refused in (
            ("max_num_queued_reqs", count.refused_by_requests),
            ("max_num_queued_tokens", count.refused_by_tokens),
        ):
            family.add_metric([self._labels["model_name"], reason], refused)
        yield family

    def _requests(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            {str(reason): count for reason, count in metrics.finished.items()},
            "finished_reason",
        )
        for name, about, histogram in (
            ("request_prompt_tokens", "Prefill tokens of a request.", metrics.prompt_tokens),
            ("request_generation_tokens", "Generation tokens of a request.", metrics.generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Generation tokens of a request; the engine knows no requests of several sequences.",
                metrics.generation_tokens,
            ),
            ("request_params_max_tokens", "The max_tokens parameter.", metrics.max_tokens_parameter),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed, not taken from the cache.",
                metrics.prefill_kv_computed,
            ),
            ("request_num_preemptions", "Preemptions of a request.", metrics.num_preemptions),
            ("iteration_tokens_total", "Tokens per engine step.", metrics.iteration_tokens),
            ("time_to_first_token_seconds", "Arrival to first token.", metrics.time_to_first_token_s),
            ("inter_token_latency_seconds", "One token to the next.", metrics.inter_token_s),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a request's tokens after the first.",
                metrics.time_per_output_token_s,
            ),
            ("e2e_request_latency_seconds", "Arrival to end.", metrics.end_to_end_s),
            ("request_queue_time_seconds", "Queued to scheduled.", metrics.queue_s),
            ("request_inference_time_seconds", "Scheduled to last token.", metrics.inference_s),
            ("request_prefill_time_seconds", "Scheduled to first token.", metrics.prefill_s),
            ("request_decode_time_seconds", "First to last token.", metrics.decode_s),
        ):
            yield self._histogram(f"vllm:{name}", about, histogram)

    def _own(self, engine: Mapping[str, object], ranks: list[Mapping[str, object]]) -> Iterator[Metric]:
        number: Mapping[str, int] = engine  # type: ignore[assignment]  # the fields read here are numbers
        metrics = self._metrics
        yield self._histogram(
            "engine_core:step_duration_seconds", "A step, from its planning to its outputs.", metrics.step_s
        )
        yield self._counter(
            "engine_core:step_stage_seconds",
            "Time in the stages of all steps. Steps overlap with async scheduling.",
            dict(zip(STAGES, metrics.stage_s, strict=True)),
            "stage",
        )
        yield self._gauge("engine_core:steps_in_flight", "Steps with the ranks.", number["in_flight"])
        yield self._gauge(
            "engine_core:seconds_since_progress",
            "Since the main loop planned a step, took in a result, or went idle.",
            max(0.0, self._clock.monotonic() - number["last_progress_s"]),
        )
        yield self._counter("engine_core:restarts", "Restarts of the ranks.", number["restarts"])
        yield self._gauge(
            "engine_core:kv_blocks",
            "KV blocks by state; cached ones are used or free.",
            {state: number[f"blocks_{state}"] for state in ("free", "used", "cached")},
            "state",
        )
        yield self._counter(
            "engine_core:rank_steps",
            "Steps that a rank has done since it started.",
            {str(rank): row["steps"] for rank, row in enumerate(ranks)},  # type: ignore[misc]
            "rank",
        )
        queues = self._queues()
        for name, about, field in (
            ("messages", "Messages", "messages"),
            ("payload_bytes", "Bytes", "payload_bytes"),
            ("waits", "Waits of the engine's end longer than a first look", "waits"),
            ("wait_seconds", "Time in those waits", "waited_s"),
        ):
            yield self._counter(
                f"engine_core:queue_{name}",
                f"{about}, by queue between engine and ranks.",
                {queue: getattr(stats, field) for queue, stats in queues.items()},
                "queue",
            )

    def _gauge(
        self, name: str, about: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._fill(GaugeMetricFamily(name, about, labels=self._names(label)), value)

    def _counter(
        self, name: str, about: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._fill(CounterMetricFamily(name, about, labels=self._names(label)), value)

    def _names(self, label: str | None) -> list[str]:
        return [*self._labels, label] if label else [*self._labels]

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]
    ) -> Metric:
        labels = list(self._labels.values())
        if isinstance(value, Mapping):
            for label, one in value.items():
                family.add_metric([*labels, label], one)
        else:
            family.add_metric(labels, value)
        return family

    def _histogram(self, name: str, about: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, about, labels=self._names(None))
        counts = list(histogram.counts)  # the main loop may be adding to them
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        family.add_metric(
            list(self._labels.values()),
            list(zip(bounds, accumulate(counts), strict=True)),
            histogram.total,
        )
        return family


def process_registry() -> CollectorRegistry:
    """With the usual series of a Python process; an `EngineCollector` joins it when there is an engine."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def renderer(registry: CollectorRegistry) -> Callable[[str], tuple[str, bytes]]:
    """For `MonitoringServer`."""

    def render(accept: str) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)

    return render
