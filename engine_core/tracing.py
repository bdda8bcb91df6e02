"""OpenTelemetry spans of requests that carry trace headers, with vLLM 0.33's name and attributes.

A request that has ended goes on a queue; a thread makes the span of it, which a processor of OpenTelemetry
exports over OTLP/HTTP. Needs the packages of the extra (`pip install 'engine-core[otel]'`).
"""

from __future__ import annotations

import threading
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_core.metrics import RequestTimes
from engine_core.protocol import FinishReason
from engine_core.request import Request
from transport.clock import SYSTEM_CLOCK, Clock

EXPORT_TIMEOUT_S = 2.0  # also how long a collector that is away may hold up the engine's end

_Ended = tuple[Request, RequestTimes, float]


def otlp_exporter(endpoint: str) -> SpanExporter:
    """To an address such as http://localhost:4318/v1/traces."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


class RequestTracer:
    """`ended` is for the thread of the step loop; it neither waits nor formats anything."""

    def __init__(
        self, exporter: SpanExporter, model_name: str, engine_index: int = 0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._model_name = model_name
        resource = Resource.create(
            {"service.name": "engine-core", "service.instance.id": str(engine_index)},
        )
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("engine_core", version("engine-core"))
        self._context_of = TraceContextTextMapPropagator().extract
        self._queue: SimpleQueue[_Ended | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def ended(self, request: Request, times: RequestTimes, now_unix_s: float) -> None:
        """A request that has trace headers is over; all about it is final."""
        self._queue.put((request, times, now_unix_s))

    def close(self) -> None:
        """Exports what there is. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._provider.shutdown()

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            self._make_span(*ended)

    def _make_span(self, request: Request, times: RequestTimes, now_unix_s: float) -> None:
        unix_s = self._clock.time() - self._clock.monotonic()  # of monotonic 0
        span = self._tracer.start_span(
            "llm_request",
            context=self._context_of(request.trace_headers or {}),
            kind=SpanKind.SERVER,
            attributes=self._attributes(request, times, now_unix_s),
            start_time=_ns(request.arrival_time),
        )
        for name, at_s in (("scheduled", times.scheduled_s), ("first token", times.first_token_s)):
            if at_s:
                span.add_event(name, timestamp=_ns(unix_s + at_s))
        if request.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(now_unix_s))

    def _attributes(self, request: Request, times: RequestTimes, now_unix_s: float) -> dict[str, Any]:
        prompt, params = request.num_prompt_tokens, request.params
        unix_s = self._clock.time() - self._clock.monotonic()
        attributes: dict[str, Any] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.completion_tokens": request.num_known_tokens - prompt,
            "gen_ai.latency.e2e": now_unix_s - request.arrival_time,
            "engine_core.cached_tokens": request.num_cached_tokens,
            "engine_core.preemptions": request.num_preemptions,
            "engine_core.finish_reason": str(request.finish_reason),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if times.scheduled_s:
            attributes["gen_ai.latency.time_in_queue"] = times.scheduled_s - times.queued_s
        if times.first_token_s:
            attributes |= {
                "gen_ai.latency.time_to_first_token": unix_s + times.first_token_s - request.arrival_time,
                "gen_ai.latency.time_in_model_prefill": times.first_token_s - times.scheduled_s,
                "gen_ai.latency.time_in_model_decode": times.last_token_s - times.first_token_s,
                "gen_ai.latency.time_in_model_inference": times.last_token_s - times.scheduled_s,
            }
        return attributes


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
