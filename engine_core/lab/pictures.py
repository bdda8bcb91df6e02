"""Pictures of simulations, as PNG or SVG by the file's name. Equal results give equal files."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_core.lab.metrics import SimulationReport, Slo
from engine_core.lab.sweep import Sweep
from engine_core.lab.timeline import Timeline
from engine_core.replay.report import Percentiles

FORMATS = (".png", ".svg")


class PictureError(Exception):
    """A picture cannot be drawn."""


def check_picture(path: str) -> None:
    """Before a long run: raises `PictureError` for a file name of no known format, or without matplotlib."""
    if Path(path).suffix not in FORMATS:
        raise PictureError(f"{path}: a picture's name ends in {' or '.join(FORMATS)}")
    _matplotlib()


def draw_timelines(timelines: Sequence[tuple[str, Timeline]], path: str) -> None:
    """Queue, KV use, throughput and time to first token over time; a colour for each labelled simulation."""
    figure, (batch, kv, tokens, ttft) = _panels(4, "simulated seconds")
    for number, (label, timeline) in enumerate(timelines):
        colour, prefix = f"C{number}", f"{label} " if label else ""
        starts, width = timeline.starts_s(), timeline.width_s
        batch.plot(starts, timeline.sums("running") / width, colour, label=f"{prefix}running")
        batch.plot(starts, timeline.sums("waiting") / width, colour, linestyle=":", label=f"{prefix}waiting")
        kv.plot(starts, timeline.sums("kv_usage") / width, colour, label=label)
        tokens.plot(
            starts, timeline.sums("prompt_tokens") / width, colour, linestyle=":", label=f"{prefix}prompt"
        )
        tokens.plot(starts, timeline.sums("output_tokens") / width, colour, label=f"{prefix}output")
        firsts = timeline.sums("first_tokens")
        some = firsts > 0
        ttft.plot(starts[some], timeline.sums("ttft_s")[some] / firsts[some], colour, label=label)
    for axes, title in (
        (batch, "requests"),
        (kv, "share of KV blocks held"),
        (tokens, "tokens/s"),
        (ttft, "time to first token, s"),
    ):
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        if len(timelines) > 1 or axes in (batch, tokens):
            axes.legend(loc="upper right", fontsize="small", ncols=2 * len(timelines))
    tokens.set_yscale("symlog", linthresh=100)
    _save(figure, path)


def draw_sweep(sweeps: Sequence[tuple[str, Sweep]], path: str) -> None:
    """Latencies, throughput, prefix hits and service level over the swept value, with the knee of each sweep;
    a colour for each. Shares that are nowhere of interest are left out.
    """
    everything = [point.report for _, sweep in sweeps for point in sweep.points]
    shares: dict[str, Callable[[SimulationReport], float]] = {}
    if any(report.prefix_hit_tokens for report in everything):
        shares["prefix hits"] = lambda report: report.prefix_hit_rate
    if any(report.slo != Slo() for report in everything):
        shares["within the\nservice level"] = lambda report: report.good_requests / max(report.requests, 1)

    name = sweeps[0][1].name
    figure, panels = _panels(3 + len(shares), "requests/s" if name == "rate" else name)
    ttft, itl, tokens = panels[:3]
    for number, (label, sweep) in enumerate(sweeps):
        x = [point.value for point in sweep.points]
        reports = [point.report for point in sweep.points]
        look = {"color": f"C{number}", "markersize": 3}
        for style, quantile in (("o-", "p50"), ("o:", "p99")):
            caption = f"{label} {quantile}".strip()
            ttft.plot(x, [_of(report.ttft_ms, quantile) for report in reports], style, label=caption, **look)
            itl.plot(x, [_of(report.itl_ms, quantile) for report in reports], style, **look)
        tokens.plot(x, [report.output_tokens_per_s for report in reports], "o-", **look)
        for axes, share in zip(panels[3:], shares.values(), strict=True):
            axes.plot(x, [share(report) for report in reports], "o-", **look)
        if sweep.knee is not None:
            for axes in panels:
                axes.axvline(sweep.knee, color=look["color"], linewidth=0.8, linestyle="--")
    for axes, title in zip(
        panels,
        ("time to first\ntoken, ms", "between\ntokens, ms", "output\ntokens/s", *shares),
        strict=True,
    ):
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
    values = [point.value for _, sweep in sweeps for point in sweep.points]
    if max(values) > 20 * min(values):
        ttft.set_xscale("log")
    ttft.set_yscale("log")
    ttft.legend(loc="upper left", fontsize="small", ncols=len(sweeps))
    _save(figure, path)


def _of(spread: Percentiles, quantile: str) -> float:
    value: float | None = getattr(spread, quantile)
    return math.nan if value is None else value


def _panels(count: int, x_label: str) -> tuple[Any, Any]:
    figure = _matplotlib()(figsize=(9, 2.1 * count), layout="constrained")
    panels = figure.subplots(count, 1, sharex=True)
    for axes in panels:
        axes.grid(True, linewidth=0.4, alpha=0.6)
    panels[-1].set_xlabel(x_label)
    return figure, panels


def _matplotlib() -> Any:
    """The class of figures. Imported late: it is an extra, and takes its time."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        figure: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PictureError(f"pictures need matplotlib: pip install 'engine-core[lab]' ({error})") from None
    matplotlib.rcParams["svg.hashsalt"] = "engine-core"  # ids in SVG files are random otherwise
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    return figure.Figure


def _save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)
