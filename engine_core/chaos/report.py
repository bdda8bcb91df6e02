"""What a campaign showed, as one object and as a table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Spread(msgspec.Struct, frozen=True):
    """In seconds; None if there was nothing to measure."""

    p50: float | None
    p99: float | None
    worst: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(None, None, None)
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(round(float(p50), 3), round(float(p99), 3), round(max(seconds), 3))


class Report(msgspec.Struct, kw_only=True):
    """Result of a campaign; `--json` prints it as it is."""

    seed: int
    faults: dict[str, int]  # by kind
    restarts: int  # of the ranks
    requests: int
    completed: int  # with all their tokens, and all of them right
    aborted: int  # on our demand
    convicted: int  # poisonous ones, which ended with the worker's error
    lost: int
    mismatched_tokens: int
    tokens: int
    recovery_s: Spread  # from a fault in the ranks until a request sent after the restart got a token
    worst_pause_s: float  # in which no request got anything, around a fault in the ranks
    engine_death_told_s: float | None  # from the kill of the engine until the last waiter knew
    leftovers: list[str]
    violations: list[str]  # what was not as promised
    wall_s: float

    @property
    def ok(self) -> bool:
        return not (self.lost or self.mismatched_tokens or self.leftovers or self.violations)


def table(report: Report) -> str:
    """The report for people: one line a figure."""
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(report.faults.items()))
    spread = report.recovery_s
    rows = [
        ("seed", str(report.seed)),
        ("faults", f"{sum(report.faults.values())}: {kinds}"),
        ("restarts of the ranks", str(report.restarts)),
        ("requests", f"{report.requests:,}"),
        ("completed", f"{report.completed:,}"),
        ("aborted", f"{report.aborted:,}"),
        ("convicted", f"{report.convicted:,}"),
        ("lost", f"{report.lost:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("mismatched tokens", f"{report.mismatched_tokens:,}"),
        ("recovery", f"p50 {_s(spread.p50)}, p99 {_s(spread.p99)}, worst {_s(spread.worst)}"),
        ("worst pause", _s(report.worst_pause_s)),
        ("engine's death told after", _s(report.engine_death_told_s)),
        ("left behind", str(len(report.leftovers))),
        ("wall time", f"{report.wall_s:,.1f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"LEFT BEHIND: {text}" for text in report.leftovers]
    lines += [f"VIOLATION: {text}" for text in report.violations]
    return "\n".join(lines)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"
