"""A picture of what `engine-core bench ipc --peers --json` measured.

    engine-core bench ipc --peers --json > ipc.json
    python -m benchmarks.ipc_chart ipc.json docs/img/transport.svg

One group of bars for each case that is a time and was measured for several; the axis is logarithmic.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {
    "engine-core": "#1b7f5c",
    "vllm": "#c2571a",
    "iceoryx2": "#3a66a8",
    "pyzmq": "#8a6bb1",
    "multiprocessing": "#8c8c8c",
}
LEFT, WIDTH, RIGHT = 330, 560, 90
BAR, GAP, TOP = 13, 16, 70


def chart(measured: dict[str, Any]) -> str:
    cases = [case for case in measured["cases"] if case["unit"] == "us" and len(case["results"]) > 1]
    values = [r["value"] for case in cases for r in case["results"].values() if "value" in r]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    unit = WIDTH / (high - low)

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low) * unit

    body = []
    y = TOP
    for case in cases:
        results = {name: r for name, r in case["results"].items() if "value" in r}
        middle = y + BAR * len(results) / 2 + 4
        body.append(f'<text x="{LEFT - 12}" y="{middle:.0f}" text-anchor="end">{escape(case["case"])}</text>')
        for name, result in results.items():
            value = result["value"]
            ratio = f" · {result['ratio']:.1f}×" if "ratio" in result else ""
            text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
            length = x(value) - LEFT
            body += [
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[name]}"/>',
                f'<text x="{x(value) + 5:.1f}" y="{y + BAR - 4}" class="value">{text}{ratio}</text>',
            ]
            y += BAR
        y += GAP
    ticks = [
        f'<line x1="{x(10**power):.0f}" y1="{TOP - 8}" x2="{x(10**power):.0f}" y2="{y - GAP}" class="tick"/>'
        f'<text x="{x(10**power):.0f}" y="{TOP - 14}" text-anchor="middle" class="value">{tick(power)}</text>'
        for power in range(low, high + 1)
    ]
    names = [name for name in COLOURS if any(name in case["results"] for case in cases)]
    legend = [
        f'<rect x="{LEFT + 130 * i}" y="16" width="11" height="11" fill="{COLOURS[name]}"/>'
        f'<text x="{LEFT + 130 * i + 17}" y="26">{name}</text>'
        for i, name in enumerate(names)
    ]
    machine = measured["machine"]
    note = (
        f"{machine['date']}, {machine['cores']} cores, Linux {machine['kernel'].split('-')[0]}, "
        f"Python {machine['python']}; "
        "medians, pinned; ×: how many times longer than engine-core"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {y + 20}" '
            'font-family="sans-serif" font-size="12">',
            "<style>.value{font-size:10px;fill:#555}.tick{stroke:#ddd}</style>",
            '<rect width="100%" height="100%" fill="white"/>',
            *legend,
            *ticks,
            *body,
            f'<text x="{LEFT}" y="{y + 8}" class="value">{escape(note)}</text>',
            "</svg>\n",
        ]
    )


def tick(power: int) -> str:
    value = 10.0**power
    return (
        f"{value:g} us" if value < 1000 else f"{value / 1000:g} ms" if value < 1e6 else f"{value / 1e6:g} s"
    )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(chart(json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
