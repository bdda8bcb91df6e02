"""One quantity of a simulation over a range of values, and where it tips over."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine_core.lab.metrics import SimulationReport

MOST_VALUES = 1000
GOOD_ENOUGH = 0.9  # share of requests within the service level, below which a rate is too high


class SweepError(ValueError):
    """A sweep cannot be read."""


class Point(msgspec.Struct, frozen=True):
    value: float
    report: SimulationReport


class Sweep(msgspec.Struct, frozen=True):
    """`--json` prints it as it is."""

    name: str  # what was varied: "rate" (requests a second) or an option of the engine
    points: list[Point]
    knee: float | None  # only of a rate


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """Name and values of `NAME=1,2,5`, `NAME=1..20` (each whole step) or `NAME=1..20..0.5`.

    Raises `SweepError`.
    """
    name, _, values = text.partition("=")
    try:
        if ".." in values:
            low, high, *step = (float(part) for part in values.split(".."))
            stride = step[0] if step else 1.0
            if len(step) > 1 or not (
                stride > 0 and low <= high < np.inf and high - low < stride * MOST_VALUES
            ):
                raise ValueError
            # Half a step of tolerance: the end is included however it is rounded.
            numbers = [low + stride * index for index in range(int((high - low) / stride + 1.5))]
            numbers = [number for number in numbers if number <= high + stride * 1e-6]
        else:
            numbers = [float(part) for part in values.split(",")]
    except ValueError:
        raise SweepError(f"{text!r} must read NAME=1,2,5 or NAME=FROM..TO or NAME=FROM..TO..STEP") from None
    least = "above 0" if name == "rate" else "from 0 on"
    if not name or not all(0 <= number < np.inf and (number or name != "rate") for number in numbers):
        raise SweepError(f"{text!r}: values are numbers {least}")
    return name.replace("_", "-"), numbers


def knee(points: Sequence[Point]) -> float | None:
    """The highest rate that the engines bear.

    With a service level: the last rate at which nine requests in ten keep it. Without: where the curve of
    the 90th percentile of the time to first token bends most, the point farthest below the line from its
    first to its last point. None if there is no such rate, or if that percentile does not even double.
    """
    points = sorted(points, key=lambda point: point.value)
    slo = points[0].report.slo
    if slo.ttft_ms is not None or slo.itl_ms is not None:
        borne = None
        for point in points:
            if point.report.good_requests < GOOD_ENOUGH * point.report.requests:
                break
            borne = point.value
        return borne
    curve = [(p.value, p.report.ttft_ms.p90) for p in points if p.report.ttft_ms.p90 is not None]
    if len(curve) < 3 or curve[-1][1] < 2 * curve[0][1]:
        return None
    x, y = np.array(curve).T
    below = (x - x[0]) / (x[-1] - x[0]) - (y - y[0]) / (y[-1] - y[0])
    best = int(below.argmax())
    return float(x[best]) if below[best] > 0 else None


def sweep_table(sweep: Sweep) -> str:
    """A line for each value."""
    lines = [
        f"{sweep.name:>16} {'TTFT p50':>10} {'p99, ms':>10} {'ITL p50':>9} {'p99, ms':>9} {'tokens/s':>10} "
        f"{'good':>7} {'hits':>7} {'preempted':>9}"
    ]
    for point in sweep.points:
        report = point.report
        good = report.good_requests / report.requests if report.requests else 0.0
        lines.append(
            f"{point.value:>16,g} {_ms(report.ttft_ms.p50, 10)} {_ms(report.ttft_ms.p99, 10)} "
            f"{_ms(report.itl_ms.p50, 9)} {_ms(report.itl_ms.p99, 9)} {report.output_tokens_per_s:>10,.1f} "
            f"{good:>7.1%} {report.prefix_hit_rate:>7.1%} {report.preemptions or 0:>9,}"
        )
    if sweep.name == "rate":
        lines.append("no knee in this range" if sweep.knee is None else f"knee at {sweep.knee:g} requests/s")
    return "\n".join(lines)


def _ms(value: float | None, width: int) -> str:
    return f"{'-' if value is None else format(value, ',.1f'):>{width}}"
