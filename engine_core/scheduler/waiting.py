"""Requests that wait to run, in the order of the scheduling policy.

Adding, taking and removing cost O(1) (fcfs) or O(log n) (priority), however many wait.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from engine_core.request import Request


class WaitingQueue(ABC):
    @abstractmethod
    def add(self, request: Request) -> None:
        """A request arrives."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """A request that had been taken (preempted, or passed over) waits again."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request. Raises IndexError if none waits."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the next request. Raises IndexError if none waits."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A waiting request ends."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In order; the queue must not change meanwhile."""


class FcfsQueue(WaitingQueue):
    """First come, first served; who is put back goes to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def put_back(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def peek(self) -> Request:
        for request in self._requests:
            return request
        raise IndexError("no request waits")

    def pop(self) -> Request:
        if not self._requests:
            raise IndexError("no request waits")
        return self._requests.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class _Entry:
    """A request's place in the heap; `request` is None once it left."""

    __slots__ = ("key", "request")

    def __init__(self, request: Request) -> None:
        self.key = (request.priority, request.arrival_time, request.request_id)
        self.request: Request | None = request

    def __lt__(self, other: _Entry) -> bool:
        return self.key < other.key


class PriorityQueue(WaitingQueue):
    """By (priority, arrival time, id), the lowest first. Who is put back takes the place of that order.

    An entry that is removed stays in the heap as a blank until it comes up, or until blanks are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._size = 0

    def add(self, request: Request) -> None:
        entry = _Entry(request)
        request.queue_entry = entry
        heapq.heappush(self._heap, entry)
        self._size += 1

    put_back = add

    def peek(self) -> Request:
        heap = self._heap
        while heap[0].request is None:
            heapq.heappop(heap)
        return heap[0].request

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        request.queue_entry = None
        self._size -= 1
        return request

    def remove(self, request: Request) -> None:
        entry = request.queue_entry
        assert isinstance(entry, _Entry) and entry.request is request
        entry.request = request.queue_entry = None
        self._size -= 1
        if len(self._heap) > 2 * self._size + 16:
            self._heap = [entry for entry in self._heap if entry.request is not None]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in sorted(self._heap) if entry.request is not None)


def make_queue(policy: str) -> WaitingQueue:
    """`policy` is "fcfs" or "priority"."""
    if policy == "priority":
        return PriorityQueue()
    if policy == "fcfs":
        return FcfsQueue()
    raise ValueError(f"unknown scheduling policy {policy!r}; there are fcfs and priority")
