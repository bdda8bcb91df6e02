"""Measure how long a worker's steps take, and write a table for `simulate --latency`.

Runs the worker that --worker-cls names over a grid: prompt tokens in the step, requests that decode beside
them, and tokens computed before.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from engine_core.cli.messages import say, writing
from engine_core.cli.options import add_engine_options, engine_config
from engine_core.cli.parser import Parser, positive_integer
from engine_core.lab.latency import LatencyTable
from engine_core.lab.profile import Grid, GridError, measure
from executor.base import make_executor
from transport.clock import SYSTEM_CLOCK


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Profile")
    group.add_argument("table", metavar="FILE.json", type=_table_name, help="where to write the table")
    group.add_argument(
        "--prefill-tokens",
        type=_numbers,
        default="32,128,512,1024",
        metavar="N,N,...",
        help="prompt tokens in a step, from 2 on",
    )
    group.add_argument(
        "--decode-seqs",
        type=_numbers,
        default="1,4,16,32",
        metavar="N,N,...",
        help="requests that decode in a step",
    )
    group.add_argument(
        "--context",
        type=_numbers,
        default="16,256,1024",
        metavar="N,N,...",
        help="tokens of each request computed before",
    )
    group.add_argument(
        "--repeats", type=positive_integer, default=5, metavar="N", help="steps whose median counts"
    )
    add_engine_options(parser)


def run(parser: Parser, args: argparse.Namespace) -> int:
    config = engine_config(parser, args)
    try:
        grid = Grid(args.prefill_tokens, args.decode_seqs, args.context, args.repeats)
    except GridError as error:
        parser.error(str(error))
    directory = Path(args.table).absolute().parent
    if not os.access(directory, os.W_OK):  # told before it is measured
        parser.error(f"{args.table}: {directory} is not there, or not to be written to")
    executor = make_executor(config.executor_config())
    try:
        capacity = executor.initialize()
        table = measure(executor, capacity, config, grid, SYSTEM_CLOCK, _progress)
    finally:
        executor.shutdown()
    with writing(args.table):
        Path(args.table).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1))
    print(summary(table))
    return 0


def summary(table: LatencyTable) -> str:
    """The table for people: milliseconds, a block for each context."""
    lines = []
    for at_context, context in enumerate(table.context):
        lines.append(
            f"after {context} tokens, ms   decoding: " + "".join(f"{n:>9}" for n in table.decode_seqs)
        )
        for at_tokens, tokens in enumerate(table.prefill_tokens):
            times = [row[at_context] * 1e3 for row in table.step_s[at_tokens]]
            lines.append(f"{tokens:>12} prompt tokens  " + " " * 8 + "".join(f"{ms:>9.2f}" for ms in times))
    return "\n".join(lines)


def _progress(done: int, total: int) -> None:
    say(f"{done} of {total} batches measured")


def _table_name(text: str) -> str:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .json")
    return text


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers, separated by commas") from None
