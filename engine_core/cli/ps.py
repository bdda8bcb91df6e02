"""List the engines of this user on this host (of all users', for root), dead ones whose ranks still live
included."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from engine_core import health
from engine_core.cli.pages import open_engines
from engine_core.cli.parser import Parser
from engine_core.cli.units import age, share
from transport.clock import SYSTEM_CLOCK

_COLUMNS = ("PID", "PHASE", "UP", "RANKS", "RUNNING", "WAITING", "KV", "STEP", "MODEL", "ADDRESS")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="whole state pages, one object a line")


def run(parser: Parser, args: argparse.Namespace) -> int:
    with open_engines() as pages:
        snapshots = [page.snapshot() for page in pages]
    if args.json:
        for snapshot in snapshots:
            print(msgspec.json.encode(snapshot).decode())
        return 0
    rows = [_COLUMNS, *(_row(snapshot) for snapshot in snapshots)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(snapshot: Mapping[str, Any]) -> tuple[str, ...]:
    engine = snapshot["engine"]
    up_s = SYSTEM_CLOCK.time() - engine["started_at_s"]
    return (
        str(engine["pid"]),
        state(snapshot, SYSTEM_CLOCK.monotonic()),
        age(up_s) if engine["started_at_s"] else "-",
        str(len(snapshot["ranks"])),
        str(engine["running"]),
        str(engine["waiting"] + engine["deferred"]),
        share(engine["blocks_used"], engine["blocks_used"] + engine["blocks_free"]),
        str(engine["step_id"]),
        engine["model"] or "-",
        engine["address"] or "-",
    )


def state(snapshot: Mapping[str, Any], now_s: float) -> str:
    """The engine in a word or two: its phase, unless that is not what matters."""
    engine = snapshot["engine"]
    if not health.live(snapshot, now_s).ok:
        return engine["phase"] if engine["phase"] in ("failed", "stopped") else "dead"
    if not health.progress(snapshot, now_s).ok:
        return "stuck"
    if engine["phase"] == "ready":
        if engine["sleep_level"]:
            return f"asleep ({engine['sleep_level']})"
        if engine["pause"] != "running":
            return "paused"
    return str(engine["phase"])
