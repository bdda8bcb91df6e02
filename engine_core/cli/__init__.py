"""The `engine-core` command.

A subcommand is a module of this package with `add_arguments(parser)` and `run(parser, args) -> int`,
imported when it is called for. Results go to stdout, logs and errors to stderr. Exit status: 0 done, 1
failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from engine_core.cli.messages import describe, say
from engine_core.cli.parser import Parser
from engine_core.logs import configure

COMMANDS = {
    "serve": "run an engine for a vLLM front end or for clients that connect",
    "chat": "talk to SmolLM2 or another GGUF file in the terminal",
    "generate": "token ids in, token ids out",
    "replay": "send recorded traffic and report how it was served",
    "replay-decisions": "run the scheduler on a recorded engine's inputs and compare its decisions",
    "profile-worker": "measure a worker's steps, for simulate",
    "ctl": "steer a running engine: pause, sleep, weights, limits, adapters, calls of workers",
    "ps": "list the engines of this host",
    "top": "watch them, live",
    "health": "answer a probe: alive, ready, getting on?",
    "doctor": "say what is wrong with this host or an engine",
    "explain": "say where a request stands and what it waits for",
    "chaos": "break an engine while it serves, and report whether it kept its promises",
    "bench": "measure messages, scheduler and engine, and vLLM's beside them",
    "simulate": "serve recorded or generated traffic in virtual time",
    "export-model-dir": "write the directory of a GGUF file that a front end wants",
}
LOG_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        parser = _top_level()
        parser.parse_args(arguments)  # exits: help, version or an error
        parser.error(f"a command is missing: {', '.join(COMMANDS)}")
    command, *rest = arguments
    try:
        module = importlib.import_module(f"engine_core.cli.{command.replace('-', '_')}")
    except KeyboardInterrupt:  # imports take long enough for a Ctrl-C
        return 128 + signal.SIGINT
    parser = Parser(prog=f"engine-core {command}", description=module.__doc__)
    module.add_arguments(parser)
    add_log_options(parser, "info" if command == "serve" else "warning")
    return run_command(module.run, parser, parser.parse_args(rest))


def open_standard_streams() -> None:
    """Those that the process was started without go to /dev/null: otherwise its sockets would get their
    numbers, and what is meant for the terminal would be written to them.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))


def run_command(
    run: Callable[[Parser, argparse.Namespace], int], parser: Parser, args: argparse.Namespace
) -> int:
    """Runs a command with logging set up; what it raises becomes one line and an exit status."""
    configure(args.log_level)
    try:
        status = run(parser, args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        more = ""
        if args.log_level == "debug":
            logging.getLogger("engine_core").exception("%s failed", parser.prog)
        elif len(str(error).splitlines()) > 1:
            more = " (--debug shows more)"
        say(f"{parser.prog}: {describe(error)}{more}")
        return 1


def add_log_options(parser: argparse.ArgumentParser, default: str) -> None:
    group = parser.add_argument_group("Logging")
    group.add_argument(
        "--log-level", type=str.lower, choices=LOG_LEVELS, default=default, help="least severe message to log"
    )
    group.add_argument(
        "--debug", dest="log_level", action="store_const", const="debug", help="same as --log-level debug"
    )


def _top_level() -> Parser:
    parser = Parser(
        prog="engine-core",
        description="An LLM inference engine's control plane.",
        epilog="engine-core COMMAND --help shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"engine-core {version('engine-core')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, help_ in COMMANDS.items():
        commands.add_parser(name, help=help_)
    return parser
