"""A scheduler of one's own: the request with the fewest prompt tokens to compute goes first.

    engine-core serve    --scheduler-cls examples.shortest_prefill_scheduler:ShortestPrefillScheduler
    engine-core simulate --scheduler-cls examples.shortest_prefill_scheduler:ShortestPrefillScheduler ...

Short prompts no longer wait behind long ones, which lowers the usual time to the first token. A long prompt
could starve, so waiting counts: a request that has waited a second longer may have AGEING tokens more to
compute and is still preferred. As all age alike, their order never changes while they wait, and a heap holds
it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.waiting import WaitingQueue

AGEING = 1000.0  # tokens that a second of waiting makes up for


class ShortestPrefillQueue(WaitingQueue):
    """Ordered by tokens to compute when a request arrives (or comes back), less its age."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._heap: list[tuple[float, str]] = []  # key and id, of requests that left too
        self._waiting: dict[str, tuple[float, Request]] = {}

    def add(self, request: Request) -> None:
        known = request.num_known_tokens
        remaining = known - len(self._kv.find_prefix(request, known)) * self._kv.block_size
        key = remaining + AGEING * request.arrival_time
        self._waiting[request.request_id] = (key, request)
        heapq.heappush(self._heap, (key, request.request_id))

    put_back = add

    def peek(self) -> Request:
        while True:
            key, request_id = self._heap[0]
            found = self._waiting.get(request_id)
            if found is not None and found[0] == key:
                return found[1]
            heapq.heappop(self._heap)  # it left, or came back under another key

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._waiting.values(), key=lambda entry: entry[0]))


class ShortestPrefillScheduler(Scheduler):
    """All else is as in the engine's own scheduler; a victim of preemption still is the newest to run."""

    def make_queue(self) -> WaitingQueue:
        return ShortestPrefillQueue(self.kv)
