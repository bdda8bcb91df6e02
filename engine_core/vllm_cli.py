"""`engine-core-vllm`: stands in for the Python that vLLM's front ends start as their engine.

`vllm-rs serve MODEL --python engine-core-vllm ...` runs it as

    engine-core-vllm -m vllm.entrypoints.cli.main serve MODEL --headless --data-parallel-address H ...

Options that `engine-core serve` knows are honoured. All others are the front end's or vLLM's own; they are
named in one warning and ignored.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence

from engine_core.cli import add_log_options, open_standard_streams, run_command
from engine_core.cli.parser import Parser
from engine_core.cli.serve import add_engine_arguments
from engine_core.cli.serve import run as serve

_MODULE = ("-m", "vllm.entrypoints.cli.main")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one engine until it is told to stop or its launcher is gone; returns the exit status."""
    launcher = os.getppid()
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if tuple(arguments[:2]) == _MODULE:
        del arguments[:2]
    parser = Parser(prog="engine-core-vllm serve MODEL", description=__doc__)
    add_engine_arguments(parser)
    add_log_options(parser, "info")
    if not arguments or arguments[0] != "serve":
        parser.error(f"expected: serve MODEL [options], found {' '.join(arguments[:1]) or 'nothing'}")
    del arguments[0]
    model = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    args, unknown = parser.parse_known_args([_with_dashes(argument) for argument in arguments])
    if model is not None:
        vars(args)["engine:model"] = model
    ignored = [word.partition("=")[0] for word in unknown if re.match(r"--?[a-zA-Z]", word)]

    def run(parser: Parser, args: Namespace) -> int:
        if ignored:
            logging.getLogger("engine_core").warning("ignored, not for this engine: %s", " ".join(ignored))
        return serve(parser, args, launcher)

    return run_command(run, parser, args)


def _with_dashes(argument: str) -> str:
    """vLLM takes underscores for dashes in the names of options."""
    if not argument.startswith("--"):
        return argument
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value


if __name__ == "__main__":
    sys.exit(main())
