"""What an engine says about itself while it runs: its row of the state page, and the times of its steps.

The page is written before the wait for the ranks, at most every two milliseconds: that is what somebody sees
who looks because it takes too long.
"""

from __future__ import annotations

from collections import deque

from engine_core.metrics import EngineMetrics
from engine_core.scheduler.scheduler import Scheduler
from transport.clock import Clock
from transport.state_rows import EngineRow

_WRITE_EVERY_S = 0.002


class SelfReport:
    """All methods belong to the thread of the step loop."""

    def __init__(
        self, scheduler: Scheduler, row: EngineRow | None, metrics: EngineMetrics | None, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._row = row
        self._metrics = metrics
        self.now = clock.monotonic
        self._in_flight: deque[tuple[float, float, float]] = deque()  # begun, planned and sent, oldest first
        self._taken_in_s = 0.0  # the step whose outputs are not on their way yet; 0: there is none
        self._written_s = 0.0
        self._step_id = 0
        self._phase_before = "ready"  # that of a restart
        self._num_tokens = 0  # of all steps; see `EngineMetrics.step`

    # A step's stages, in order.

    def sent(self, step_id: int, begun_s: float, planned_s: float, now_s: float) -> None:
        """A step is with the ranks; when its planning began and ended."""
        self._step_id = step_id
        self._in_flight.append((begun_s, planned_s, now_s))

    def waiting(self) -> None:
        """For the oldest step's answer."""
        if self._row is not None:
            now_s = self._in_flight[-1][2]
            if now_s - self._written_s >= _WRITE_EVERY_S:
                self._written_s = now_s
                self._write(self._row, now_s)

    def taken_in(self, answered_s: float) -> None:
        """The oldest step's outcome, which was there at `answered_s`."""
        begun_s, planned_s, sent_s = self._in_flight.popleft()
        if self._metrics is None:
            return
        self._taken_in_s = now_s = self.now()
        count = self._scheduler.counters
        num_tokens = count.generation_tokens + count.prompt_tokens - count.cached_tokens
        self._metrics.step(num_tokens - self._num_tokens, begun_s, planned_s, sent_s, answered_s, now_s)
        self._num_tokens = num_tokens

    def delivered(self) -> None:
        """The outputs of the step taken in last, if there was one since the last call, are on their way."""
        if self._taken_in_s and self._metrics is not None:
            self._metrics.output(self.now() - self._taken_in_s)
            self._taken_in_s = 0.0

    def refresh(self) -> None:
        """Bring the page up to date now: something was changed from outside."""
        if self._row is not None:
            self._write(self._row, self.now())

    # The loop.

    def going_idle(self) -> None:
        """The loop is about to wait for work."""
        if self._row is not None:
            self._write(self._row, self.now())
            self._written_s = 0.0
            self._row.awake_since_s = 0.0

    def awake(self) -> None:
        if self._row is not None:
            self._row.awake_since_s = self.now()

    # Failures.

    def restarting_workers(self) -> None:
        """What was in flight is lost."""
        self._in_flight.clear()
        if self._row is not None and self._row.phase != "restarting workers":
            self._phase_before = self._row.phase
            self._row.phase = "restarting workers"

    def workers_restarted(self, num_restarts: int) -> None:
        if self._row is not None:
            self._row.restarts = num_restarts
            self._row.phase = self._phase_before

    def first_error(self, cause: str) -> None:
        if self._row is not None and not self._row.first_error:
            self._row.first_error = cause

    def _write(self, row: EngineRow, now_s: float) -> None:
        scheduler = self._scheduler
        count, pool = scheduler.counters, scheduler.kv.pool
        deferred = scheduler.num_deferred
        free = pool.num_free
        row.progress(  # in the order of its parameters: by name it would take half as long again
            self._step_id,
            now_s,
            len(self._in_flight),
            scheduler.num_running,
            scheduler.num_waiting - deferred,
            deferred,
            count.requests_admitted,
            count.requests_finished,
            free,
            pool.num_blocks - 1 - free,
            pool.num_cached,
            count.prefix_requests,
            count.prefix_queries,
            count.prefix_hits,
            count.prompt_tokens,
            count.cached_tokens,
            count.generation_tokens,
            count.preemptions,
        )
