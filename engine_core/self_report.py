"""What an engine says about itself while it runs: its row of the state page, and the times of its steps.

`EngineCore` tells a `SelfReport` of each stage of a step. The page is written once a turn, before the wait
for the ranks: that is what somebody sees who looks because it takes too long.
"""

from __future__ import annotations

from collections import deque

from engine_core.metrics import EngineMetrics
from engine_core.scheduler.scheduler import Scheduler
from transport.clock import Clock
from transport.state_rows import EngineRow


class SelfReport:
    """All methods belong to the thread of the step loop."""

    def __init__(
        self, scheduler: Scheduler, row: EngineRow | None, metrics: EngineMetrics | None, clock: Clock
    ) -> None:
        self._scheduler = scheduler
        self._row = row
        self._metrics = metrics
        self._now = clock.monotonic
        self._in_flight: deque[tuple[float, float, float]] = deque()  # begun, planned and sent, oldest first
        self._begun_s = self._planned_s = self._answered_s = self._taken_in_s = 0.0
        self._step_id = 0
        self._phase_before = "ready"  # that of a restart
        self._num_tokens = 0  # of all steps; see `EngineMetrics.step`

    # A step's stages, in order.

    def planning(self) -> None:
        self._begun_s = self._now()

    def planned(self) -> None:
        self._planned_s = self._now()

    def sent(self, step_id: int) -> None:
        self._step_id = step_id
        self._in_flight.append((self._begun_s, self._planned_s, self._now()))

    def waiting(self) -> None:
        """For the oldest step's answer."""
        if self._row is not None:
            self._write(self._row, self._in_flight[-1][2])

    def answered(self) -> None:
        self._answered_s = self._now()

    def taken_in(self) -> None:
        begun, planned, sent = self._in_flight.popleft()
        self._taken_in_s = now = self._now()
        if self._metrics is None:
            return
        count = self._scheduler.counters
        num_tokens = count.generation_tokens + count.prompt_tokens - count.cached_tokens
        self._metrics.step(
            num_tokens - self._num_tokens,
            now - begun,
            (planned - begun, sent - planned, self._answered_s - sent, now - self._answered_s),
        )
        self._num_tokens = num_tokens

    def delivered(self) -> None:
        """The outputs of the step taken in last, if there was one since the last call, are on their way."""
        if self._taken_in_s:
            if self._metrics is not None:
                self._metrics.output(self._now() - self._taken_in_s)
            self._taken_in_s = 0.0

    # The loop.

    def going_idle(self) -> None:
        """The loop is about to wait for work."""
        if self._row is not None:
            self._write(self._row, self._now())
            self._row.awake_since_s = 0.0

    def awake(self) -> None:
        if self._row is not None:
            self._row.awake_since_s = self._now()

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
        row.progress(
            step_id=self._step_id,
            last_progress_s=now_s,
            in_flight=len(self._in_flight),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting - deferred,
            deferred=deferred,
            requests_admitted=count.requests_admitted,
            requests_finished=count.requests_finished,
            blocks_free=free,
            blocks_used=pool.num_blocks - 1 - free,
            blocks_cached=pool.num_cached,
            prefix_requests=count.prefix_requests,
            prefix_queries=count.prefix_queries,
            prefix_hits=count.prefix_hits,
            prompt_tokens=count.prompt_tokens,
            cached_tokens=count.cached_tokens,
            generation_tokens=count.generation_tokens,
            preemptions=count.preemptions,
        )
