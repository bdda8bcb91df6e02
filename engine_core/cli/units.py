"""Numbers as people read them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def age(seconds: float) -> str:
    """`0.4 s`, `12 s`, `5 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def share(part: float, whole: float) -> str:
    """`41.3 %`, or `-` of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def sparkline(values: Sequence[float], width: int, most: float | None = None) -> str:
    """The last `width` values as bars, up to `most` (default: the largest of them)."""
    shown = values[-width:]
    top = max(shown, default=0.0) if most is None else most
    if top <= 0:
        return _BARS[0] * len(shown)
    steps = len(_BARS) - 1
    return "".join(_BARS[min(steps, max(0, round(steps * value / top)))] for value in shown)
