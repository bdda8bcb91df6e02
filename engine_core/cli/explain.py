"""Say of a request where it stands: since when, what it waits for, what is ahead of it, how often it was
preempted and for whom; also of requests that ended in the last minutes.
"""

from __future__ import annotations

import argparse

import msgspec

from engine_core.cli.pages import open_page
from engine_core.cli.parser import Parser
from engine_core.client import EngineClient
from engine_core.scheduler.explain import Explanation


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Request")
    group.add_argument("request_id", metavar="REQUEST", help="its id, or an unambiguous beginning of it")
    group.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    group = parser.add_argument_group("Which engine")
    group.add_argument(
        "--connect",
        metavar="ADDRESS",
        help="a running engine, by the address that `engine-core serve` printed (default: the only engine of "
        "this host)",
    )


def run(parser: Parser, args: argparse.Namespace) -> int:
    with EngineClient.connect(args.connect or _only_address()) as client:
        answer = client.explain(args.request_id)
    print(msgspec.json.encode(answer).decode() if args.json else as_text(answer))
    return 0


def _only_address() -> str:
    with open_page(None) as page:
        engine = page.snapshot()["engine"]
    if not engine["address"]:
        raise ValueError(f"engine {engine['pid']} does not listen for clients of its own (serve --listen)")
    return str(engine["address"])


def as_text(answer: Explanation) -> str:
    """The answer for people: a sentence a line."""
    lines = [f"request {answer.request_id}: {answer.state}", *(f"  {text}" for text in answer.sentences)]
    if answer.ahead:
        more = "" if answer.place is None or answer.place <= len(answer.ahead) else ", ..."
        lines.append(f"  ahead of it: {', '.join(answer.ahead)}{more}")
    return "\n".join(lines)
