"""Which requests have to end by when."""

from __future__ import annotations

import heapq

from engine_core.request import Request, Status


class Deadlines:
    """Of one engine's live requests. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0  # settles the order of equal times

    def add(self, request: Request, at_s: float) -> None:
        heapq.heappush(self._heap, (at_s, self._count, request))
        self._count += 1

    def next_s(self) -> float | None:
        """The earliest one of a live request."""
        heap = self._heap
        while heap and heap[0][2].status is Status.FINISHED:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_overdue(self, now_s: float) -> list[Request]:
        """Live requests whose time has come; each is given once."""
        overdue = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            overdue.append(heapq.heappop(self._heap)[2])
        return overdue
