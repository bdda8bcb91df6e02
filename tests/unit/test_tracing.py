"""Spans of requests with trace headers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from engine_core.protocol import FinishReason
from engine_core.tracing import RequestTracer
from tests.engines import mock_config, prompt
from tests.scheduling import CheckedCore

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def test_a_traced_request_becomes_a_span_below_the_callers() -> None:
    kept = Kept()
    tracer = RequestTracer(kept, "mock")
    checked = CheckedCore(mock_config(), trace=tracer.ended)
    now = checked.core._clock.time()
    checked.add("silent", prompt(1, 10), max_tokens=4, arrival_time=now)
    checked.add("traced", prompt(2, 40), max_tokens=6, arrival_time=now, trace_headers=HEADERS)
    failed = checked.add("failed", prompt(3, 10), max_tokens=6, arrival_time=now, trace_headers=HEADERS)
    checked.scheduler.finish_requests([failed.request_id], FinishReason.ERROR)
    checked.run()
    tracer.close()
    checked.core.shutdown()

    spans = {span.attributes["gen_ai.request.id"]: span for span in kept.spans if span.attributes}
    assert spans.keys() == {"traced", "failed"}
    span = spans["traced"]
    assert span.name == "llm_request"
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.usage.prompt_tokens"] == 40
    assert attributes["gen_ai.usage.completion_tokens"] == attributes["gen_ai.request.max_tokens"] == 6
    assert attributes["engine_core.finish_reason"] == "length"
    phases = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    total = sum(float(attributes[f"gen_ai.latency.{phase}"]) for phase in phases)  # type: ignore[arg-type]
    assert 0 < total <= float(attributes["gen_ai.latency.e2e"])  # type: ignore[arg-type]
    assert [event.name for event in span.events] == ["scheduled", "first token"]
    assert span.start_time is not None and span.end_time is not None
    assert span.start_time <= span.events[0].timestamp <= span.events[1].timestamp <= span.end_time
    assert spans["failed"].status.status_code is StatusCode.ERROR
    assert "gen_ai.latency.time_to_first_token" not in (spans["failed"].attributes or {})
