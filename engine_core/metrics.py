"""Latencies and sizes for dashboards, recorded as the scheduler goes.

The step loop bumps plain numbers here and in the state page; nothing is formatted, and no lock is taken,
until somebody scrapes (`prometheus`). The definitions are those of vLLM 0.33's front end, seen from the
engine: a time ends when the engine has the token, not when a client gets it, and a request that a front end
stops at a stop string is an aborted one.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_core.protocol import FinishReason
from engine_core.request import Request
from executor.step import Int32s

# Bounds of vLLM 0.33's histograms.
REQUEST_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
STEP_DURATION = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 30.0, 60.0),
)

_STEPS_AT_ONCE = 256

STAGES = ("schedule", "broadcast", "execute", "update", "output")


def request_tokens_bounds(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `max_model_len`."""
    bounds: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_model_len:
                return tuple(bounds)
            bounds.append(step * scale)
        scale *= 10


class Histogram:
    """Counts of values by upper bound (inclusive), and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        for bucket, count in enumerate(np.bincount(np.searchsorted(self.bounds, values)).tolist()):
            self.counts[bucket] += count
        self.total += float(values.sum())


@dataclass(slots=True)
class RequestTimes:
    """Of one request, on the monotonic clock; 0: not yet."""

    queued_s: float
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


Trace = Callable[[Request, RequestTimes, float], None]


class EngineMetrics:
    """Written by the main loop's thread, read by any."""

    def __init__(self, max_num_seqs: int, max_model_len: int, trace: Trace | None = None) -> None:
        """`trace(request, times, now)` is called for each request with trace headers that is over; `now` is
        Unix time.
        """
        self._trace = trace
        tokens = request_tokens_bounds(max_model_len)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = Histogram(tokens)  # of finished requests, as what follows
        self.generation_tokens = Histogram(tokens)
        self.max_tokens_parameter = Histogram(tokens)
        self.prefill_kv_computed = Histogram(tokens)
        self.num_preemptions = Histogram(NUM_PREEMPTIONS)
        self.end_to_end_s = Histogram(REQUEST_LATENCY)
        self.queue_s = Histogram(REQUEST_LATENCY)
        self.inference_s = Histogram(REQUEST_LATENCY)
        self.prefill_s = Histogram(REQUEST_LATENCY)
        self.decode_s = Histogram(REQUEST_LATENCY)
        self.time_per_output_token_s = Histogram(INTER_TOKEN_LATENCY)
        self.time_to_first_token_s = Histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token_s = Histogram(INTER_TOKEN_LATENCY)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.step_s = Histogram(STEP_DURATION)
        self.stage_s = [0.0] * len(STAGES)  # in all steps

        self._times: dict[Request, RequestTimes] = {}
        self._last_token_s = np.zeros(max_num_seqs)  # by slot
        # The slots of the last call of `tokens`, and when it was: their times are not in `_last_token_s` yet.
        self._together: Int32s | None = None
        self._together_s = 0.0
        self._steps: deque[tuple[float, ...]] = deque()  # arguments of `step`, not in the histograms yet
        self._folding = threading.Lock()

    # The life of a request. Times are the engine's monotonic clock, in seconds.

    def queued(self, request: Request, now_s: float) -> None:
        """A request was accepted."""
        self._times[request] = RequestTimes(now_s)

    def scheduled(self, request: Request, now_s: float) -> None:
        """A request entered the batch, for the first time or again; its slot is set."""
        times = self._times[request]
        if not times.scheduled_s:
            times.scheduled_s = now_s
        self._last_token_s[request.slot] = times.last_token_s

    def preempted(self, request: Request) -> None:
        """A request is about to leave the batch and to wait; its slot is still set."""
        self._settle()
        self._times[request].last_token_s = float(self._last_token_s[request.slot])

    def first_token(self, request: Request, now_s: float, now_unix_s: float) -> None:
        """A request has its first token. To be called before `tokens` for the same step."""
        times = self._times[request]
        times.first_token_s = times.last_token_s = now_s
        self.time_to_first_token_s.observe(now_unix_s - request.arrival_time)
        if request.slot >= 0:
            self._last_token_s[request.slot] = now_s

    def tokens(self, slots: Int32s, now_s: float) -> None:
        """Each of the running requests in `slots` (n,) has one more token; none of them its first."""
        count = len(slots)
        if not count:
            return
        self._settle()
        self.inter_token_s.observe_all(now_s - self._last_token_s[slots])
        self._together = slots.copy()
        self._together_s = now_s

    def tokens_again(self, now_s: float) -> bool:
        """The same requests as in the last call of `tokens` have one more token each. False, and nothing is
        done, if that call cannot be repeated.
        """
        together = self._together
        if together is None:
            return False
        self.inter_token_s.observe(now_s - self._together_s, len(together))
        self._together_s = now_s
        return True

    def _settle(self) -> None:
        if self._together is not None:
            self._last_token_s[self._together] = self._together_s
            self._together = None

    def stale_token(self, request: Request, now_s: float) -> None:
        """A request that is not in the batch has one more token, not its first."""
        times = self._times[request]
        self.inter_token_s.observe(now_s - times.last_token_s)
        times.last_token_s = now_s

    def ended(self, request: Request, slot: int | None, now_unix_s: float) -> None:
        """A request is over; its tokens and `finish_reason` are final. `slot` is what it had if it was
        running.
        """
        self._settle()
        times = self._times.pop(request)
        if slot is not None:
            times.last_token_s = float(self._last_token_s[slot])
        if self._trace is not None and request.trace_headers is not None:
            self._trace(request, times, now_unix_s)
        assert request.finish_reason is not None
        self.finished[request.finish_reason] += 1
        prompt = request.num_prompt_tokens
        generated = request.num_known_tokens - prompt
        self.prompt_tokens.observe(prompt)
        self.generation_tokens.observe(generated)
        self.num_preemptions.observe(request.num_preemptions)
        if request.params.max_tokens is not None:
            self.max_tokens_parameter.observe(request.params.max_tokens)
        self.end_to_end_s.observe(now_unix_s - request.arrival_time)
        if not times.first_token_s:
            return  # there are no phases to tell apart
        last_token_s = times.last_token_s
        self.prefill_kv_computed.observe(prompt - request.num_cached_tokens)
        self.queue_s.observe(times.scheduled_s - times.queued_s)
        self.prefill_s.observe(times.first_token_s - times.scheduled_s)
        self.inference_s.observe(last_token_s - times.scheduled_s)
        decode_s = last_token_s - times.first_token_s
        self.decode_s.observe(decode_s)
        self.time_per_output_token_s.observe(decode_s / (generated - 1) if generated > 1 else 0.0)

    # Steps.

    def step(
        self,
        num_tokens: int,
        begun_s: float,
        planned_s: float,
        sent_s: float,
        answered_s: float,
        taken_in_s: float,
    ) -> None:
        """A step is over, but for its output; when each stage of it ended. `num_tokens`: sampled, and of
        prompts whose first token it sampled, those computed.
        """
        self._steps.append((num_tokens, begun_s, planned_s, sent_s, answered_s, taken_in_s))
        if len(self._steps) >= _STEPS_AT_ONCE:
            self.fold_steps()

    def fold_steps(self) -> None:
        """Bring what is told of steps up to date; from any thread."""
        with self._folding:
            steps = [self._steps.popleft() for _ in range(len(self._steps))]
            if not steps:
                return
            table = np.array(steps)
            num_tokens, times = table[:, 0], table[:, 1:]
            self.iteration_tokens.observe_all(num_tokens[num_tokens > 0])
            self.step_s.observe_all(times[:, -1] - times[:, 0])
            for stage, seconds in enumerate(np.diff(times).sum(axis=0).tolist()):
                self.stage_s[stage] += seconds

    def output(self, seconds: float) -> None:
        """It took so long to encode and send what a step has yielded."""
        self.stage_s[-1] += seconds
