"""One line about the engine now and then, with the content of vLLM's."""

from __future__ import annotations

import logging
import threading
from collections import deque

from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_page import PageView

logger = logging.getLogger("engine_core")

INTERVAL_S = 10.0
_RECENT_REQUESTS = 1000  # vLLM's window of the hit rate


class StatsLog:
    """Compares the state page with what it was at the line before.

    Between `start` and `stop` a thread writes a line every `INTERVAL_S`, also while the engine hangs.
    """

    def __init__(self, page: PageView, engine_index: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._page = page
        self._prefix = f"Engine {engine_index:03d}: "
        self._clock = clock
        self._before = page.snapshot()["engine"]
        self._before_s = clock.monotonic()
        self._was_idle = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats-log", daemon=True)
        # Requests looked up, tokens queried and found, by interval, over the last so many requests.
        self._lookups: deque[tuple[int, int, int]] = deque()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """To be called before the page is closed."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self.log()

    def log(self) -> None:
        """Writes the line; at level DEBUG if nothing happened in this and the last interval."""
        row, now_s = self._page.snapshot()["engine"], self._clock.monotonic()
        before, seconds = self._before, max(now_s - self._before_s, 1e-9)
        self._before, self._before_s = row, now_s

        def since(name: str) -> int:
            return int(row[name] - before[name])

        prompt = (since("prompt_tokens") - since("cached_tokens")) / seconds
        generation = since("generation_tokens") / seconds
        parts = [
            f"Avg prompt throughput: {prompt:.1f} tokens/s",
            f"Avg generation throughput: {generation:.1f} tokens/s",
            f"Running: {row['running']} reqs",
            f"Waiting: {row['waiting'] + row['deferred']} reqs",
        ]
        if row["deferred"]:
            parts.append(f"Deferred: {row['deferred']} reqs")
        if preemptions := since("preemptions"):
            parts.append(f"Preemptions: {preemptions}")
        blocks = max(1, row["blocks_used"] + row["blocks_free"])
        parts.append(f"GPU KV cache usage: {100 * row['blocks_used'] / blocks:.1f}%")
        self._keep_recent((since("prefix_requests"), since("prefix_queries"), since("prefix_hits")))
        if queries := sum(lookup[1] for lookup in self._lookups):
            hits = sum(lookup[2] for lookup in self._lookups)
            parts.append(f"Prefix cache hit rate: {100 * hits / queries:.1f}%")
        idle = not prompt and not generation
        logger.log(
            logging.DEBUG if idle and self._was_idle else logging.INFO, self._prefix + ", ".join(parts)
        )
        self._was_idle = idle

    def _keep_recent(self, lookup: tuple[int, int, int]) -> None:
        lookups = self._lookups
        if lookup[0]:
            lookups.append(lookup)
        while len(lookups) > 1 and sum(requests for requests, _, _ in lookups) > _RECENT_REQUESTS:
            lookups.popleft()
