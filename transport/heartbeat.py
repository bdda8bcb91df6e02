"""A sign of life in a process's row of the state page."""

from __future__ import annotations

import threading

from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_rows import ProcessRow


class Heartbeat:
    """A thread that stores the time in `row.heartbeat_s` every `interval_s`, from `start` to `stop`.

    While it beats, the process is neither stopped nor dead, and no call holds the interpreter. The thread
    that does the work may still be stuck; the rest of the row tells.
    """

    def __init__(self, row: ProcessRow, *, interval_s: float = 1.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._row = row
        self._interval_s = interval_s
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """To be called before the page is closed."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._row.heartbeat_s = self._clock.monotonic()
            if self._stopped.wait(self._interval_s):
                return
