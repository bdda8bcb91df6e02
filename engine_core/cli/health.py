"""Answer a probe: is the engine alive, is it ready, does it get on?

The answer comes from the state page, so it comes whatever the engine does. Prints a sentence for each
question, and exits with 0 if all answers are yes, with 1 if one is no or there is no such engine.
"""

from __future__ import annotations

import argparse

from engine_core import health
from engine_core.cli.pages import add_engine_argument, open_page
from engine_core.cli.parser import Parser, positive_float
from transport.clock import SYSTEM_CLOCK


def add_arguments(parser: Parser) -> None:
    add_engine_argument(parser)
    group = parser.add_argument_group("Questions (default: all)")
    group.add_argument("--live", action="store_true", help="the process runs; if not, restart it")
    group.add_argument("--ready", action="store_true", help="it takes requests; if not, send it none for now")
    group.add_argument("--progress", action="store_true", help="it gets on with the work it has")
    group.add_argument(
        "--stall-limit-s",
        type=positive_float,
        default=health.STALL_LIMIT_S,
        metavar="N",
        help="seconds without progress, work at hand, after which the answer is no",
    )


def run(parser: Parser, args: argparse.Namespace) -> int:
    asked = [name for name in ("live", "ready", "progress") if getattr(args, name)]
    with open_page(args.engine) as page:
        snapshot = page.snapshot()
    now_s = SYSTEM_CLOCK.monotonic()
    status = 0
    for name in asked or ("live", "ready", "progress"):
        if name == "live":
            verdict = health.live(snapshot, now_s)
        elif name == "ready":
            verdict = health.ready(snapshot, now_s)
        else:
            verdict = health.progress(snapshot, now_s, stall_limit_s=args.stall_limit_s)
        print(f"{name}: {'yes' if verdict.ok else 'no'}: {verdict.reason}")
        status |= not verdict.ok
    return status
