"""Break an engine while it serves, and report whether it kept its promises.

An engine with mock workers serves checked requests while ranks are killed, stopped and made to raise, hang
or answer garbage, clients are killed, requests are poisonous or aborted, and rubbish comes in on every
socket. In the end the engine is killed, and whatever is left of it is found.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import msgspec

from engine_core.chaos.campaign import Campaign, Settings, kinds_named
from engine_core.chaos.faults import BY_NAME
from engine_core.chaos.report import Report, table
from engine_core.cli.messages import say
from engine_core.cli.parser import Parser, integer, positive_integer
from engine_core.cli.session import run_until_done
from engine_core.replay.traces import load_trace

_ROUND = 10  # faults after which progress is told


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--seed", type=integer, metavar="N", help="repeats the same plan of faults (default: a random one)"
    )
    parser.add_argument("--faults", type=positive_integer, default=50, metavar="N", help="to commit")
    parser.add_argument(
        "--requests",
        type=integer,
        default=0,
        metavar="N",
        help="at least (default: as many as come)",
    )
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=positive_integer, default=2, metavar="N", help="worker ranks"
    )
    parser.add_argument(
        "--max-concurrency", type=positive_integer, default=48, metavar="N", help="requests in flight"
    )
    parser.add_argument("--trace", metavar="FILE", help="recorded requests to send (default: generated ones)")
    parser.add_argument(
        "--kinds",
        default=",".join(BY_NAME),
        metavar="NAMES",
        help=f"faults to choose from, separated by commas (default: {', '.join(BY_NAME)})",
    )
    parser.add_argument(
        "--engine-log",
        metavar="FILE",
        help="for the engine's standard error (default: a temporary file, kept if a promise is broken)",
    )
    parser.add_argument("--json", action="store_true", help="the report as a JSON object")


def run(parser: Parser, args: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    try:
        kinds = kinds_named(args.kinds.split(","))
    except ValueError as error:
        parser.error(f"--kinds {args.kinds}: {error}")
    log = Path(args.engine_log or tempfile.mkstemp(prefix=f"chaos-{seed}-", suffix=".log")[1])
    settings = Settings(
        seed=seed,
        num_ranks=args.tensor_parallel_size,
        concurrency=args.max_concurrency,
        trace=None if args.trace is None else load_trace(args.trace),
        kinds=kinds,
        engine_log=log,
    )
    say(f"seed {seed}; the engine's log is {log}")
    reports: list[Report] = []
    try:
        run_until_done(_run(settings, args.faults, args.requests, reports))
    except KeyboardInterrupt:
        if args.engine_log is None:
            log.unlink()
        raise
    report = reports[0]
    print(msgspec.json.encode(report).decode() if args.json else table(report))
    if report.ok and args.engine_log is None:
        log.unlink()
    return 0 if report.ok else 1


async def _run(settings: Settings, num_faults: int, num_requests: int, reports: list[Report]) -> int:
    rounds = -(-num_faults // _ROUND)
    async with Campaign(settings) as campaign:
        for number in range(rounds):
            faults = min(_ROUND, num_faults - number * _ROUND)
            await campaign.run(settings.seed + number, faults, num_requests // rounds + 1)
            done = min((number + 1) * _ROUND, num_faults)
            say(f"{done} of {num_faults} faults, {campaign.num_requests:,} requests")
        reports.append(await campaign.finish())
    return 0
