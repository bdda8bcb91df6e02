"""A live engine's spans, at an OTLP collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from engine_core.client import EngineClient
from executor.sampling_params import SamplingParams
from tests.engines import mock_config, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Address, and the bodies that were posted there."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_the_collector(
    collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, bodies = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with EngineClient.launch(mock_config(otlp_traces_endpoint=address)) as client:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        list(client.generate([1, 2, 3], SamplingParams(max_tokens=3), trace_headers=headers))
    wait_until(lambda: bool(bodies), "a span has come")
    (body,) = bodies
    assert bytes.fromhex(TRACE) in body and b"llm_request" in body


def test_an_engine_ends_in_time_without_its_collector() -> None:
    with EngineClient.launch(mock_config(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")) as client:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        list(client.generate([1, 2, 3], SamplingParams(max_tokens=3), trace_headers=headers))
        assert client._connection.process is not None
        process = client._connection.process
    assert process.poll() == 0
