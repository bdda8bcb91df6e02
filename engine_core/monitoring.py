"""HTTP beside the engine: metrics for Prometheus, and the three questions of `health` for probes.

It answers from the state page on threads of its own, so it answers when the main loop does not.

    /metrics            Prometheus text, or OpenMetrics if asked for
    /health/live        200 or 503, and a sentence; also /health
    /health/ready
    /health/progress
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from engine_core import health
from engine_core.config import ConfigError
from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_page import PageView

logger = logging.getLogger("engine_core")

Render = Callable[[str], tuple[str, bytes]]  # Accept header to content type and body

_CLIENT_TIMEOUT_S = 10.0  # to send a request
_PLAIN = "text/plain; charset=utf-8"


class MonitoringServer:
    """Listens from construction on, serves between `start` and `close`."""

    def __init__(
        self, host: str, port: int, page: PageView, render: Render, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`port` 0 takes a free one. Raises ConfigError if the address cannot be listened on."""
        try:
            self._server = _Server(host, port, page, render, clock)
        except OSError as error:
            raise ConfigError("metrics_port", port, f"cannot listen on {host}: {error.strerror}") from error
        self.host, self.port = self._server.server_address[:2]
        self._thread = threading.Thread(target=self._server.serve_forever, name="monitoring", daemon=True)

    def start(self) -> None:
        self._thread.start()
        logger.info("Metrics and health at http://%s:%d", self.host, self.port)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, page: PageView, render: Render, clock: Clock) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.page = page
        self.render = render
        self.clock = clock
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in mid-answer is its own business; anything else is a fault to be seen."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            logger.error("Monitoring: the request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/metrics":
            self._answer(200, *self.server.render(self.headers.get("Accept", "")))
        elif path in _QUESTIONS:
            verdict = _QUESTIONS[path](self.server.page.snapshot(), self.server.clock.monotonic())
            self._answer(200 if verdict.ok else 503, _PLAIN, f"{verdict.reason}\n".encode())
        else:
            self._answer(404, _PLAIN, f"there are {', '.join(('/metrics', *_QUESTIONS))}\n".encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("Monitoring: " + format, *args)


_QUESTIONS: dict[str, Callable[[health.Snapshot, float], health.Verdict]] = {
    "/health": health.live,
    "/health/live": health.live,
    "/health/ready": health.ready,
    "/health/progress": health.progress,
}
