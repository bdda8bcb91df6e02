"""Say what is wrong with this host and its engines, and what to do about it.

Exits with 0 if nothing is to be mended, with 1 otherwise. Works on engines that hang, and on a saved copy of
a state page.
"""

from __future__ import annotations

import argparse

from engine_core.cli.pages import add_engine_argument, find_engines, open_page
from engine_core.cli.parser import Parser
from engine_core.doctor import Finding, Level, examine_engine, examine_host
from transport.clock import SYSTEM_CLOCK
from transport.state_page import PageLocation


def add_arguments(parser: Parser) -> None:
    add_engine_argument(parser)


def run(parser: Parser, args: argparse.Namespace) -> int:
    engines = find_engines()
    findings: list[Finding] = []
    targets: list[tuple[str, PageLocation | None]]
    if args.engine is None:
        findings += examine_host()
        targets = [(str(engine.engine_pid), engine) for engine in engines]
    else:
        named = (engine for engine in engines if str(engine.engine_pid) == args.engine)
        targets = [(args.engine, next(named, None))]
    for target, location in targets:
        with open_page(target) as page:
            findings += examine_engine(page.snapshot(), SYSTEM_CLOCK.monotonic(), location)
    for finding in findings:
        print(f"{finding.level.value:4} {finding.text}")
    if not targets:
        print("no engine of this user runs on this host")
    return int(any(finding.level is Level.BAD for finding in findings))
