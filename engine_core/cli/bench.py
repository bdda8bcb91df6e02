"""Measure this engine on this machine, and others beside it."""

from __future__ import annotations

import argparse
import importlib

from engine_core.cli.parser import Parser

BENCHMARKS = {
    "ipc": "messages from the engine to its workers and back",
    "scheduler": "planning a step and taking in its outcome",
    "engine": "an engine process behind its socket",
}


def add_arguments(parser: Parser) -> None:
    benchmarks = parser.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True
    )
    for name, help_ in BENCHMARKS.items():
        module = importlib.import_module(f"engine_core.bench.{name}")
        benchmark = benchmarks.add_parser(name, help=help_, description=module.__doc__)
        module.add_arguments(benchmark)
        benchmark.set_defaults(measure=module.run)


def run(parser: Parser, args: argparse.Namespace) -> int:
    status: int = args.measure(args)
    return status
