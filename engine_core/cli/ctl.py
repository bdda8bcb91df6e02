"""Steer a running engine: pause and resume, put it to sleep, change its weights, adapters and limits, call
its workers.

The engine must have a lobby (`engine-core serve` prints its address; behind a vLLM front end it needs
--listen). What is returned is printed as JSON; the exit status is 1 if the engine refuses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import msgspec

from engine_core.cli.pages import lobby_address
from engine_core.cli.parser import Parser, key_value, positive_float, positive_integer
from engine_core.client import EngineClient

Action = Callable[[argparse.Namespace], tuple[str, list[Any]]]  # to a utility call and its arguments
_MODES = ("abort", "wait", "keep")


def add_arguments(parser: Parser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--connect", metavar="ADDRESS", help="address of the engine's lobby")
    which.add_argument(
        "--pid", metavar="PID", help="process id of the engine (default: the only engine of this host)"
    )
    parser.add_argument(
        "--timeout-s", type=positive_float, default=600.0, metavar="N", help="seconds to wait for the answer"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, help_: str, call: Action) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=help_, description=help_)
        made.set_defaults(call=call)
        return made

    _add_pausing(action)
    _add_weights(action)
    _add_loras(action)
    _add_looks(action)


AddAction = Callable[[str, str, Action], argparse.ArgumentParser]


def _add_pausing(action: AddAction) -> None:
    pause = action(
        "pause",
        "stop generation, and refuse new requests until resume",
        lambda args: ("pause_generation", [args.mode, not args.keep_cache]),
    )
    _add_mode(pause, "abort")
    pause.add_argument("--keep-cache", action="store_true", help="leave the prefix cache as it is")
    action("resume", "go on after a pause or a drain", lambda args: ("resume_scheduler", []))
    action("is-paused", "say whether it is paused", lambda args: ("is_scheduler_paused", []))
    action("drain", "refuse new requests, return when all have ended", lambda args: ("drain", []))
    sleep = action(
        "sleep",
        "have the workers give their memory back",
        lambda args: ("sleep", [args.level, args.mode]),
    )
    sleep.add_argument(
        "level", type=int, choices=(0, 1, 2), help="0: pause only; 1: put the weights aside; 2: drop them"
    )
    _add_mode(sleep, "abort")
    wake = action("wake", "undo sleep or release-kv-cache", lambda args: ("wake_up", [args.tags or None]))
    wake.add_argument("tags", nargs="*", metavar="TAG", help="weights, kv_cache, scheduling (default: all)")
    action(
        "release-kv-cache",
        "after a pause, have the workers drop the KV cache",
        lambda args: ("release_kv_cache_memory", []),
    )
    reset = action(
        "reset-prefix-cache",
        "forget what is cached; false if requests hold blocks",
        lambda args: ("reset_prefix_cache", [args.running]),
    )
    reset.add_argument("--running", action="store_true", help="preempt the requests that run")


def _add_mode(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--mode",
        choices=_MODES,
        default=default,
        help="what becomes of running requests: they are ended, waited for, or kept",
    )


def _add_weights(action: AddAction) -> None:
    weights = action(
        "weights",
        "update the weights on every rank, and name their version",
        lambda args: ("update_weights", [args.version, args.path, None, dict(args.option), args.mode]),
    )
    weights.add_argument("version", metavar="VERSION", help="outputs are stamped with it")
    weights.add_argument("--path", metavar="PATH", help="where the workers find them")
    weights.add_argument(
        "--option", action="append", type=key_value, default=[], metavar="NAME=VALUE", help="for the worker"
    )
    _add_mode(weights, "keep")
    action(
        "restore-weights",
        "restart the ranks with the last version that was complete",
        lambda args: ("restore_weights", []),
    )


def _add_loras(action: AddAction) -> None:
    lora = action(
        "add-lora", "load an adapter", lambda args: ("add_lora", [[args.name, args.lora_id, args.path]])
    )
    lora.add_argument("name", metavar="NAME")
    lora.add_argument("lora_id", type=positive_integer, metavar="ID")
    lora.add_argument("path", metavar="PATH")
    for name, help_ in (("remove", "forget an adapter"), ("pin", "keep an adapter from being evicted")):
        one = action(f"{name}-lora", help_, lambda args, name=name: (f"{name}_lora", [args.lora_id]))  # type: ignore[misc]
        one.add_argument("lora_id", type=positive_integer, metavar="ID")
    action("list-loras", "ids of the loaded adapters", lambda args: ("list_loras", []))


def _add_looks(action: AddAction) -> None:
    limits = action(
        "set",
        "change limits, up to what the engine was started with; without options, show them",
        lambda args: ("set_limits", [args.max_num_seqs, args.max_num_batched_tokens]),
    )
    limits.add_argument(
        "--max-num-seqs", type=positive_integer, metavar="N", help="requests that run at the same time"
    )
    limits.add_argument(
        "--max-num-batched-tokens", type=positive_integer, metavar="N", help="tokens that one step computes"
    )
    level = action("log-level", "of the engine and its ranks", lambda args: ("set_log_level", [args.level]))
    level.add_argument("level", metavar="LEVEL", help="debug, info, warning, error")
    profile = action(
        "profile",
        "start or stop the workers' profilers; prints the files",
        lambda args: ("profile", [True, args.prefix]) if args.what == "start" else ("stop_profile", []),
    )
    profile.add_argument("what", choices=("start", "stop"))
    profile.add_argument("--prefix", metavar="PATH", help="of the files' names")
    barrier = action(
        "barrier",
        "wait until every rank has done what was sent to it; names those that have not",
        lambda args: ("barrier", [args.name, args.within_s]),
    )
    barrier.add_argument("name", metavar="NAME", help="for the message")
    barrier.add_argument("--within-s", type=positive_float, default=30.0, metavar="N")
    rpc = action(
        "rpc",
        "call a method of the worker on every rank; prints the answers by rank",
        lambda args: ("collective_rpc", [args.method, None, args.arguments]),
    )
    rpc.add_argument("method", metavar="METHOD")
    rpc.add_argument("arguments", nargs="*", type=_json, metavar="ARGUMENT", help="JSON, or else a text")


def run(parser: Parser, args: argparse.Namespace) -> int:
    method, arguments = args.call(args)
    with EngineClient.connect(args.connect or lobby_address(args.pid)) as client:
        answer = client.utility(method, *arguments, timeout_s=args.timeout_s)
    if answer is not None:
        print(msgspec.json.encode(answer, enc_hook=str).decode())
    return 0


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
