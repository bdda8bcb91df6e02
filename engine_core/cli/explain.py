"""Say of a request where it stands: since when, what it waits for, what is ahead of it, how often it was
preempted and for whom; also of requests that ended in the last minutes.
"""

from __future__ import annotations

import argparse

import msgspec

from engine_core.cli.pages import lobby_address
from engine_core.cli.parser import Parser
from engine_core.client import EngineClient
from engine_core.scheduler.explain import Explanation


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Request")
    group.add_argument("request_id", metavar="REQUEST", help="its id, or an unambiguous beginning of it")
    group.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    which = parser.add_argument_group("Which engine").add_mutually_exclusive_group()
    which.add_argument("--connect", metavar="ADDRESS", help="address that `engine-core serve` printed")
    which.add_argument(
        "--pid", metavar="PID", help="process id of the engine (default: the only engine of this host)"
    )


def run(parser: Parser, args: argparse.Namespace) -> int:
    with EngineClient.connect(args.connect or lobby_address(args.pid)) as client:
        answer = client.explain(args.request_id)
    print(msgspec.json.encode(answer).decode() if args.json else as_text(answer))
    return 0


def as_text(answer: Explanation) -> str:
    """The answer for people: a sentence a line."""
    lines = [f"request {answer.request_id}: {answer.state}", *(f"  {text}" for text in answer.sentences)]
    if answer.ahead:
        more = "" if answer.place is None or answer.place <= len(answer.ahead) else ", ..."
        lines.append(f"  ahead of it: {', '.join(answer.ahead)}{more}")
    return "\n".join(lines)
