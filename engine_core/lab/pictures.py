"""Pictures of simulations, as PNG or SVG by the file's name. Equal results give equal files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine_core.lab.sweep import Sweep
from engine_core.lab.timeline import Timeline

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
    """Latencies, throughput and prefix hits over the swept value, with the knee; a colour for each sweep."""
    figure, (ttft, itl, tokens, hits) = _panels(4, sweeps[0][1].name)
    for number, (label, sweep) in enumerate(sweeps):
        colour, prefix = f"C{number}", f"{label} " if label else ""
        x = [point.value for point in sweep.points]
        reports = [point.report for point in sweep.points]
        for axes, spreads in (
            (ttft, [report.ttft_ms for report in reports]),
            (itl, [report.itl_ms for report in reports]),
        ):
            for name, style in (("p50", "o-"), ("p99", "o:")):
                y = [np.nan if getattr(s, name) is None else getattr(s, name) for s in spreads]
                axes.plot(x, y, style, color=colour, markersize=3, label=f"{prefix}{name}")
        rates = [report.output_tokens_per_s for report in reports]
        tokens.plot(x, rates, "o-", color=colour, markersize=3, label=label)
        hit_rates = [report.prefix_hit_rate for report in reports]
        hits.plot(x, hit_rates, "o-", color=colour, markersize=3, label=label)
        if sweep.knee is not None:
            for axes in (ttft, itl, tokens, hits):
                axes.axvline(sweep.knee, color=colour, linewidth=0.8, linestyle="--")
    ttft.set_yscale("log")
    for axes, title in (
        (ttft, "time to first\ntoken, ms"),
        (itl, "between\ntokens, ms"),
        (tokens, "output\ntokens/s"),
        (hits, "prefix hits"),
    ):
        axes.set_ylabel(title)
    tokens.set_ylim(bottom=0)
    hits.set_ylim(0, 1)
    ttft.legend(loc="upper left", fontsize="small", ncols=len(sweeps))
    _save(figure, path)


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
    return figure.Figure


def _save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)
