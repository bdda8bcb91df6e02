"""What became of requests: why running ones were preempted, and how ended ones had fared. For `explain`."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from engine_core.request import Request

MOST_FINISHED = 4096  # ended requests that are remembered
REMEMBERED_S = 600.0  # and for how long

# Why a request was preempted.
BLOCKS_RAN_OUT = "blocks ran out"
CACHE_RESET = "the prefix cache was reset"
WORKERS_RESTARTED = "the workers were restarted"
SEARCH = "it sits out while the request that makes the workers fail is searched for"


class Preemption(msgspec.Struct, frozen=True):
    """One time that a request lost its blocks. Times are the engine's monotonic clock, in seconds."""

    at_s: float
    step_id: int
    why: str
    winner: str | None  # id of the request that needed the blocks; the request's own if it was the worst


class FinishedRequest(msgspec.Struct, frozen=True):
    """A request that ended."""

    request_id: str
    queued_s: float  # when it arrived and when it ended
    ended_s: float
    finish_reason: str
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    preemptions: list[Preemption]


class History:
    """Preemptions of live requests, and the last ended requests."""

    def __init__(self) -> None:
        self.preemptions: dict[Request, list[Preemption]] = {}
        self._finished: OrderedDict[str, FinishedRequest] = OrderedDict()  # oldest first

    def preempted(self, request: Request, preemption: Preemption) -> None:
        self.preemptions.setdefault(request, []).append(preemption)

    def ended(self, request: Request, now_s: float) -> None:
        """Its `finish_reason` is set."""
        self._finished[request.request_id] = FinishedRequest(
            request.request_id,
            request.queued_s,
            now_s,
            str(request.finish_reason),
            request.stop_reason,
            request.num_prompt_tokens,
            request.num_known_tokens - request.num_prompt_tokens,
            request.num_cached_tokens,
            self.preemptions.pop(request, []),
        )
        self._finished.move_to_end(request.request_id)
        if len(self._finished) > MOST_FINISHED:
            self._finished.popitem(last=False)

    def finished(self, now_s: float) -> dict[str, FinishedRequest]:
        """Those that are remembered, by id, oldest first."""
        while self._finished and next(iter(self._finished.values())).ended_s < now_s - REMEMBERED_S:
            self._finished.popitem(last=False)
        return self._finished
