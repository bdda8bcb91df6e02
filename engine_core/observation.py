"""All that lets others see an engine from outside, from the first moment to the last.

The state page and its heartbeat are always there; metrics over HTTP, KV events and the line in the log are
if the configuration asks for them.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING

from engine_core.config import ConfigError, EngineConfig
from engine_core.core import EngineCore
from engine_core.kv_events import KVEventRecorder
from engine_core.stats_log import StatsLog
from transport.clock import Clock
from transport.heartbeat import Heartbeat
from transport.state_page import StatePage

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from engine_core.monitoring import MonitoringServer
    from engine_core.tracing import RequestTracer


class Observation:
    """For the main thread. What it starts is stopped by `stack`."""

    def __init__(self, stack: ExitStack, config: EngineConfig, engine_index: int, clock: Clock) -> None:
        """Raises `ConfigError` for an address that cannot be had or a package that is missing."""
        self._stack = stack
        self._config = config
        self._engine_index = engine_index
        self._clock = clock
        self.page = stack.enter_context(StatePage.create(config.tensor_parallel_size))
        self.row = row = self.page.engine
        row.claim()
        row.version = version("engine-core")
        row.started_at_s = clock.time()
        row.model = config.model or config.worker_cls
        stack.callback(self._stopped)
        heartbeat = Heartbeat(row, clock=clock)
        heartbeat.start()
        stack.callback(heartbeat.stop)
        self.monitoring: MonitoringServer | None = None
        self._registry: CollectorRegistry | None = None
        if config.metrics_port is not None:
            self._open_monitoring(config.metrics_port)
        self.kv_events = self._open_kv_events()
        self.tracer = self._open_tracer()

    def _open_monitoring(self, port: int) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError(
                "metrics_port",
                port,
                "needs the prometheus_client package: pip install 'engine-core[metrics]'",
            )
        from engine_core.monitoring import MonitoringServer
        from engine_core.prometheus import process_registry, renderer

        self._registry = process_registry()
        self.monitoring = MonitoringServer(
            self._config.metrics_host,
            port + self._engine_index if port else 0,
            self.page.view,
            renderer(self._registry),
            self._clock,
        )
        self._stack.callback(self.monitoring.close)
        self.monitoring.start()

    def _open_kv_events(self) -> KVEventRecorder | None:
        events = self._config.kv_events_config
        if events is None or not events.publishes:
            return None
        from engine_core.kv_publisher import ZmqEventPublisher

        publisher = ZmqEventPublisher(events, self._config.block_size, self._engine_index)
        self._stack.callback(publisher.close)
        return KVEventRecorder(publisher, self._clock)

    def _open_tracer(self) -> RequestTracer | None:
        endpoint = self._config.otlp_traces_endpoint
        if not endpoint:
            return None
        try:
            from engine_core.tracing import RequestTracer, otlp_exporter
        except ImportError as error:
            reason = f"needs the packages of the extra: pip install 'engine-core[otel]' ({error})"
            raise ConfigError("otlp_traces_endpoint", endpoint, reason) from error
        tracer = RequestTracer(otlp_exporter(endpoint), self.row.model, self._engine_index, self._clock)
        self._stack.callback(tracer.close)
        return tracer

    def engine_made(self, core: EngineCore) -> None:
        """The workers are up."""
        config, row = self._config, self.row
        row.max_num_seqs = config.max_num_seqs
        row.max_num_batched_tokens = config.max_num_batched_tokens
        row.max_model_len = core.capacity.max_model_len
        row.block_size = config.block_size
        row.num_blocks = core.capacity.num_gpu_blocks
        row.weight_version = "default"
        if core.report is not None:
            core.report.going_idle()
        if self._registry is not None and core.metrics is not None:
            from engine_core.prometheus import EngineCollector

            collector = EngineCollector(
                self.page.view,
                core.scheduler.counters,
                core.metrics,
                model_name=row.model,
                engine_index=self._engine_index,
                cache_config={
                    "block_size": config.block_size,
                    "num_gpu_blocks": core.capacity.num_gpu_blocks,
                    "num_gpu_blocks_override": config.num_gpu_blocks_override,
                    "enable_prefix_caching": config.enable_prefix_caching,
                    "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
                },
                max_loras=config.max_loras if config.enable_lora else 0,
                adapters=core.scheduler.adapters,
                queues=core.executor.queue_stats,
                clock=self._clock,
            )
            self._registry.register(collector)
        if config.log_stats:
            log = StatsLog(self.page.view, self._engine_index, self._clock)
            log.start()
            self._stack.callback(log.stop)

    def crashed(self, cause: str) -> None:
        self.row.first_error = cause  # in place of one that was got over
        self.row.phase = "failed"

    def _stopped(self) -> None:
        if self.row.phase != "failed":
            self.row.phase = "stopped"
