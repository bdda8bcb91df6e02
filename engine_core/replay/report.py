"""What a replay showed, as one object and as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.replay.driver import Record

TokensOf = Callable[[npt.NDArray[np.int32], int], npt.NDArray[np.int32]]  # prompt, count -> the right output

_NUMBER = re.compile(r"\d+(\.\d+)?")


class Percentiles(msgspec.Struct, frozen=True):
    """Of latencies in milliseconds; None if there was nothing to measure."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float] | npt.NDArray[np.float64]) -> Percentiles:
        if not len(seconds):
            return cls(None, None, None)
        p50, p90, p99 = np.percentile(np.asarray(seconds), [50, 90, 99]) * 1e3
        return cls(round(float(p50), 3), round(float(p90), 3), round(float(p99), 3))


class Report(msgspec.Struct, kw_only=True):
    """Result of a replay; `--json` prints it as it is."""

    requests: int  # of the trace, sent or not
    completed: int  # answered with exactly the recorded number of tokens
    failed: int
    unfinished: int  # not sent or not answered when the replay was stopped
    mismatched_tokens: int | None  # tokens that differ from the mock's function; None: the worker is no mock
    prompt_tokens: int  # of the requests sent
    output_tokens: int  # received
    prefix_hit_tokens: int  # prompt tokens that the engine found in its prefix cache
    prefix_hit_tokens_unbounded: (
        int | None
    )  # of the same requests in a cache that never evicts, by calculation
    preemptions: int | None  # of these requests; None: the engine does not report events
    engine_steps: int | None
    wall_s: float
    output_tokens_per_s: float
    ttft_ms: Percentiles  # sent -> first token
    itl_ms: Percentiles  # token -> next token of the same request
    e2e_ms: Percentiles  # sent -> last token, of completed requests
    failures: dict[str, int]  # what failed requests said, and how many said it

    @property
    def ok(self) -> bool:
        return self.completed == self.requests and not self.mismatched_tokens


def make_report(
    records: Sequence[Record],
    *,
    num_requests: int,
    wall_s: float,
    vocab_size: int,
    tokens_of: TokensOf | None,
    unbounded_hits: Sequence[int] | None,
    engine_steps: int | None,
) -> Report:
    """Counts, checks and percentiles of the requests that were sent.

    `tokens_of` gives the tokens that are right for a prompt; `unbounded_hits` is by row of the trace.
    """
    failed = [record for record in records if record.failure is not None]
    completed = [record for record in records if record.completed]
    failures: dict[str, int] = {}
    first_of_kind: dict[str, str] = {}  # reasons that differ in numbers alone are one kind
    for record in failed:
        reason = record.failure or ""
        reason = first_of_kind.setdefault(_NUMBER.sub("#", reason), reason)
        failures[reason] = failures.get(reason, 0) + 1
    answered = [record for record in records if record.arrived_s]
    gaps = [np.diff(np.frombuffer(record.arrived_s)) for record in answered]
    output_tokens = sum(len(record.token_ids) for record in records)
    return Report(
        requests=num_requests,
        completed=len(completed),
        failed=len(failed),
        unfinished=num_requests - len(completed) - len(failed),
        mismatched_tokens=None if tokens_of is None else _mismatches(records, vocab_size, tokens_of),
        prompt_tokens=sum(record.request.input_length for record in records),
        output_tokens=output_tokens,
        prefix_hit_tokens=sum(record.num_cached_tokens for record in records),
        prefix_hit_tokens_unbounded=None
        if unbounded_hits is None
        else sum(unbounded_hits[record.request.row] for record in answered),
        preemptions=_sum_if_known(record.num_preemptions for record in answered),
        engine_steps=engine_steps,
        wall_s=round(wall_s, 3),
        output_tokens_per_s=round(output_tokens / wall_s, 1) if wall_s > 0 else 0.0,
        ttft_ms=Percentiles.of([record.arrived_s[0] - record.sent_s for record in answered]),
        itl_ms=Percentiles.of(np.concatenate(gaps) if gaps else []),
        e2e_ms=Percentiles.of([record.arrived_s[-1] - record.sent_s for record in completed]),
        failures=failures,
    )


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _mismatches(records: Sequence[Record], vocab_size: int, tokens_of: TokensOf) -> int:
    """Received tokens that are not those of the prompt."""
    wrong = 0
    for record in records:
        received = np.frombuffer(record.token_ids, np.int32)
        if len(received):
            right = tokens_of(record.request.prompt(vocab_size), len(received))
            wrong += int(np.count_nonzero(received != right))
    return wrong


def table(report: Report) -> str:
    """The report for people: one line a figure."""
    of = (
        ""
        if report.prefix_hit_tokens_unbounded is None
        else f" of {report.prefix_hit_tokens_unbounded:,} possible"
    )
    share = report.prefix_hit_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    rows = [
        ("requests", f"{report.requests:,}"),
        ("completed", f"{report.completed:,}"),
        ("failed", f"{report.failed:,}"),
        *([("unfinished", f"{report.unfinished:,}")] if report.unfinished else []),
        ("mismatched tokens", _count(report.mismatched_tokens)),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("output tokens", f"{report.output_tokens:,}"),
        ("prefix-hit tokens", f"{report.prefix_hit_tokens:,}{of} ({share:.1%} of the prompts)"),
        ("preemptions", _count(report.preemptions)),
        ("engine steps", _count(report.engine_steps)),
        ("wall time", f"{report.wall_s:,.2f} s"),
        ("output tokens/s", f"{report.output_tokens_per_s:,.1f}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines.append(f"{'latency, ms':<{width}}  {'p50':>10} {'p90':>10} {'p99':>10}")
    for name, spread in (
        ("time to first token", report.ttft_ms),
        ("between tokens", report.itl_ms),
        ("end to end", report.e2e_ms),
    ):
        lines.append(f"{name:<{width}}  {_ms(spread.p50)} {_ms(spread.p90)} {_ms(spread.p99)}")
    for reason, count in report.failures.items():
        lines.append(f"{count:,} failed: {reason}")
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"


def _ms(value: float | None) -> str:
    return f"{'-' if value is None else format(value, ',.2f'):>10}"
