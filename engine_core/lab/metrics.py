"""What a simulation measures while it runs, in little memory, and its report."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.lab.simulated_request import SimulatedRequest
from engine_core.lab.timeline import Timeline
from engine_core.replay.report import Percentiles, Report
from engine_core.replay.report import table as report_table

Float64s = npt.NDArray[np.float64]


class Slo(msgspec.Struct, frozen=True):
    """What a request must keep to count as good; None: no matter."""

    ttft_ms: float | None = None  # until the first token
    itl_ms: float | None = None  # between two tokens, on the request's average

    def met(self, ttft_s: float, itl_s: float) -> bool:
        return (self.ttft_ms is None or ttft_s * 1e3 <= self.ttft_ms) and (
            self.itl_ms is None or itl_s * 1e3 <= self.itl_ms
        )


class RequestResult(msgspec.Struct, frozen=True):
    """One line of the per-request CSV. Times in seconds of the simulation; empty where there was no token."""

    row: int
    engine: int
    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    ttft_ms: float | None
    mean_itl_ms: float | None
    e2e_ms: float | None
    good: bool  # completed within the service level
    finish_reason: str  # length, error, or unfinished


class SimulationReport(Report, kw_only=True):
    """The keys of a replay's report, and those that only a simulation has. `wall_s` is simulated time."""

    engines: int
    latency_model: str
    slo: Slo
    good_requests: int  # completed within `slo`
    goodput_per_s: float  # of these, per second
    prefix_hit_rate: float  # of the prompt tokens of requests admitted
    refused: int  # could never fit; they are among `failed`
    skipped_lines: int  # of the trace, malformed
    kv_usage_mean: float  # share of blocks held, over time and engines
    kv_usage_peak: float
    waiting_peak: int  # requests that waited at once
    workers_busy: float  # share of the time in which workers computed


# Names of the quantities in `Metrics.timeline`; first states, then events.
STATES = ("running", "waiting", "kv_usage")
EVENTS = ("prompt_tokens", "output_tokens", "first_tokens", "ttft_s")  # prompt tokens: computed ones


@dataclass(slots=True)
class Metrics:
    """Fed by the engines of one simulation."""

    slo: Slo
    timeline: Timeline = field(default_factory=lambda: Timeline(STATES + EVENTS))
    requests: int = 0  # arrived
    completed: int = 0
    good: int = 0
    refused: int = 0
    unfinished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    admitted_tokens: int = 0  # prompt tokens of requests that were admitted
    preemptions: int = 0
    kv_usage_peak: float = 0.0
    waiting_peak: int = 0
    last_s: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    _ttft_s: array[float] = field(default_factory=lambda: array("d"))
    _e2e_s: array[float] = field(default_factory=lambda: array("d"))
    # Gaps between tokens: most rows of a step have the same one.
    _gap_s: array[float] = field(default_factory=lambda: array("d"))
    _gap_count: array[int] = field(default_factory=lambda: array("q"))

    def first_token(self, request: SimulatedRequest, now_s: float) -> None:
        ttft_s = now_s - request.source.arrival_s
        self._ttft_s.append(ttft_s)
        self.hit_tokens += request.num_cached_tokens
        self.admitted_tokens += request.num_prompt_tokens
        self.timeline.count(now_s, (1, ttft_s), first=len(STATES) + 2)

    def tokens(self, now_s: float, computed: int, output: int) -> None:
        """Prompt tokens were computed, and output tokens came."""
        self.output_tokens += output
        self.timeline.count(now_s, (computed, output), first=len(STATES))

    def gaps(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the token before them."""
        self._gap_s.append(seconds)
        self._gap_count.append(count)

    def fail(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def ended(self, request: SimulatedRequest, engine: int, reason: str) -> RequestResult:
        """A request got its last token, or never will."""
        source, tokens = request.source, request.num_output_tokens
        self.preemptions += request.num_preemptions
        result = RequestResult(
            row=source.row,
            engine=engine,
            arrival_s=source.arrival_s,
            first_token_s=request.first_s if tokens else None,
            finished_s=request.last_s if reason == "length" else None,
            prompt_tokens=source.input_length,
            output_tokens=tokens,
            cached_tokens=request.num_cached_tokens,
            preemptions=request.num_preemptions,
            ttft_ms=_ms(request.first_s - source.arrival_s) if tokens else None,
            mean_itl_ms=_ms((request.last_s - request.first_s) / (tokens - 1)) if tokens > 1 else None,
            e2e_ms=_ms(request.last_s - source.arrival_s) if reason == "length" else None,
            good=self._is_good(request, reason),
            finish_reason=reason,
        )
        if reason == "length" and tokens == source.output_length:
            self.completed += 1
            self.good += result.good
            self._e2e_s.append(request.last_s - source.arrival_s)
        elif reason == "length":
            self.fail(f"ended by length after {tokens} of {source.output_length} tokens")
        elif reason == "unfinished":
            self.unfinished += 1
        return result

    def _is_good(self, request: SimulatedRequest, reason: str) -> bool:
        tokens = request.num_output_tokens
        if reason != "length" or tokens < request.source.output_length:
            return False
        itl_s = (request.last_s - request.first_s) / (tokens - 1) if tokens > 1 else 0.0
        return self.slo.met(request.first_s - request.source.arrival_s, itl_s)

    def report(
        self,
        *,
        engines: int,
        engine_steps: int,
        busy_s: float,
        latency_model: str,
        unbounded_hits: int | None,
        skipped_lines: int,
    ) -> SimulationReport:
        wall_s = self.last_s
        usage = self.timeline.sums("kv_usage").sum() / (wall_s * engines) if wall_s else 0.0
        return SimulationReport(
            requests=self.requests,
            completed=self.completed,
            failed=sum(self.failures.values()),
            unfinished=self.unfinished,
            mismatched_tokens=None,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            prefix_hit_tokens=self.hit_tokens,
            prefix_hit_tokens_unbounded=unbounded_hits,
            preemptions=self.preemptions,
            engine_steps=engine_steps,
            wall_s=round(wall_s, 3),
            output_tokens_per_s=_rate(self.output_tokens, wall_s),
            ttft_ms=Percentiles.of(self._ttft_s),
            itl_ms=weighted_percentiles(self._gap_s, self._gap_count),
            e2e_ms=Percentiles.of(self._e2e_s),
            failures=self.failures,
            engines=engines,
            latency_model=latency_model,
            slo=self.slo,
            good_requests=self.good,
            goodput_per_s=_rate(self.good, wall_s),
            prefix_hit_rate=round(self.hit_tokens / max(self.admitted_tokens, 1), 4),
            refused=self.refused,
            skipped_lines=skipped_lines,
            kv_usage_mean=round(float(usage), 4),
            kv_usage_peak=round(self.kv_usage_peak, 4),
            waiting_peak=self.waiting_peak,
            workers_busy=round(busy_s / (wall_s * engines), 4) if wall_s else 0.0,
        )


def weighted_percentiles(seconds: array[float], counts: array[int]) -> Percentiles:
    """`Percentiles.of` the values, each repeated `counts` times, without repeating them."""
    if not counts:
        return Percentiles(None, None, None)
    values = np.frombuffer(seconds, np.float64)
    order = np.argsort(values, kind="stable")
    values = values[order]
    ends = np.cumsum(np.frombuffer(counts, np.int64)[order])  # value i is at the ranks below ends[i]
    last = int(ends[-1]) - 1
    quantiles = []
    for share in (0.5, 0.9, 0.99):
        rank = int(share * last)
        low, high = values[np.searchsorted(ends, [rank, min(rank + 1, last)], side="right")]
        quantiles.append(round(float(low + (high - low) * (share * last - rank)) * 1e3, 3))
    return Percentiles(*quantiles)


def table(report: SimulationReport) -> str:
    """The report for people: that of a replay, and below it what only a simulation has."""
    rows = [
        ("engines", f"{report.engines:,}"),
        ("KV blocks held", f"{report.kv_usage_mean:.1%} on average, {report.kv_usage_peak:.1%} at most"),
        ("waiting requests", f"{report.waiting_peak:,} at most"),
        ("workers busy", f"{report.workers_busy:.1%} of the time"),
    ]
    limits = [
        f"{name} <= {limit:g} ms"
        for name, limit in (("first token", report.slo.ttft_ms), ("between tokens", report.slo.itl_ms))
        if limit is not None
    ]
    if limits:
        share = report.good_requests / report.requests if report.requests else 0.0
        rows.append(
            (
                "goodput",
                f"{report.goodput_per_s:,.2f} requests/s, {share:.1%} of all within " + ", ".join(limits),
            )
        )
    if report.refused:
        rows.append(("can never fit", f"{report.refused:,}"))
    if report.skipped_lines:
        rows.append(("skipped lines", f"{report.skipped_lines:,}"))
    return report_table(report) + "\n" + "\n".join(f"{name:<19}  {value}" for name, value in rows)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(count: int, wall_s: float) -> float:
    return round(count / wall_s, 3) if wall_s else 0.0
