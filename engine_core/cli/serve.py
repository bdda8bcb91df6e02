"""Run an engine until it is told to stop.

With --data-parallel-rpc-port (or another option of that group) it dials a vLLM front end; otherwise it
listens for clients of its own, and prints the address to give to --connect as the only line on standard
output.
"""

from __future__ import annotations

import argparse
import logging
import os
from functools import partial
from typing import Any, TextIO

from engine_core.cli.engine_group import run_group
from engine_core.cli.launcher import stop_with
from engine_core.cli.model_config import mock_options
from engine_core.cli.options import add_engine_options, engine_config, given
from engine_core.cli.parser import Parser, integer, positive_integer
from engine_core.config import EngineConfig
from engine_core.handshake import FrontEnd
from engine_core.lobby_protocol import default_address, stream_socket
from engine_core.logs import configure
from engine_core.proc import Serving, run_engine

logger = logging.getLogger("engine_core")

RPC_PORT = 29550  # vLLM's default
MAX_ENGINES = 1 << 16  # an engine's index has two bytes on the wire


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    add_engine_arguments(parser)


def add_engine_arguments(parser: Parser) -> None:
    """All but the model, which vLLM's argv gives as a word of its own."""
    group = parser.add_argument_group("vLLM front end to dial")
    group.add_argument(
        "--data-parallel-address", "-dpa", metavar="HOST", help="its host (default: 127.0.0.1)"
    )
    group.add_argument(
        "--data-parallel-rpc-port", "-dpp", type=_port, metavar="PORT", help=f"its port (default: {RPC_PORT})"
    )
    group.add_argument(
        "--headless", action="store_true", help="vLLM's word for an engine that dials; implied"
    )
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=positive_integer,
        default=1,
        metavar="N",
        help="engines behind the front end",
    )
    group.add_argument(
        "--data-parallel-size-local",
        "-dpl",
        type=positive_integer,
        metavar="N",
        help="engines to run here, each a process (default: all of them; 1 with a rank)",
    )
    rank = group.add_mutually_exclusive_group()
    rank.add_argument("--data-parallel-rank", "-dpn", type=integer, metavar="N", help="run this engine alone")
    rank.add_argument(
        "--data-parallel-start-rank", "-dpr", type=integer, metavar="N", help="first engine run here"
    )
    group = parser.add_argument_group("Clients of its own")
    group.add_argument(
        "--listen",
        type=_address,
        metavar="ADDRESS",
        help="ipc:///path, ipc://@name or tcp://host:port (default: a private one, or none with a front end)",
    )
    add_engine_options(parser)


def run(parser: Parser, args: argparse.Namespace, launcher: int | None = None) -> int:
    """`launcher` is the process with which the engines end; None: they do not care."""
    if getattr(args, "model_tag", None) is not None:
        vars(args)["engine:model"] = args.model_tag
    config = engine_config(parser, args, **defaults_for_mock(given(args)))
    configure(args.log_level, config.log_format)
    ranks = _ranks(parser, args)
    watch = partial(stop_with, launcher) if launcher is not None else None
    if watch is not None and (ranks is None or len(ranks) == 1):
        watch()
    if ranks is None:
        return _run(config, None, args.listen or default_address())
    host = args.data_parallel_address or "127.0.0.1"
    port = args.data_parallel_rpc_port or RPC_PORT
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    front_ends = [FrontEnd(handshake_address=address, engine_index=rank) for rank in ranks]
    if len(front_ends) == 1:
        return _run(config, front_ends[0], args.listen)
    if args.listen:
        parser.error(f"--listen {args.listen}: takes one engine, not {len(front_ends)}")
    return run_group([partial(_run, config, front_end, None) for front_end in front_ends], watch)


def defaults_for_mock(chosen: dict[str, Any]) -> dict[str, Any]:
    """Options of a mock worker that stands for a model in a directory."""
    worker_cls = chosen.get("worker_cls", EngineConfig().worker_cls)
    if worker_cls != EngineConfig().worker_cls:
        return {}
    return {"worker_options": mock_options(chosen.get("model", ""))}


def _run(config: EngineConfig, front_end: FrontEnd | None, lobby_address: str | None) -> int:
    if front_end is not None:
        logger.info("engine %d dials %s", front_end.engine_index, front_end.handshake_address)
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)  # what a worker in this process prints is no address
        announce = partial(_announce, stdout)
        return run_engine(config, front_end=front_end, lobby_address=lobby_address, on_serving=announce)


def _announce(stdout: TextIO, serving: Serving) -> None:
    ready = serving.ready
    logger.info(
        "serving: %d worker rank(s), %d KV blocks of %d tokens, requests up to %d tokens",
        ready.world_size,
        ready.num_gpu_blocks,
        ready.block_size,
        ready.max_model_len,
    )
    if serving.lobby is not None:
        print(serving.lobby, file=stdout, flush=True)


def _ranks(parser: Parser, args: argparse.Namespace) -> range | None:
    """Indices of the engines to run here; None if no front end is to be dialled."""
    start = args.data_parallel_rank if args.data_parallel_rank is not None else args.data_parallel_start_rank
    dials = (args.data_parallel_address, args.data_parallel_rpc_port, args.data_parallel_size_local, start)
    if not args.headless and args.data_parallel_size == 1 and all(option is None for option in dials):
        return None
    size = args.data_parallel_size
    local = args.data_parallel_size_local
    if args.data_parallel_rank is not None:
        if local not in (None, 1):
            parser.error(f"--data-parallel-size-local {local}: --data-parallel-rank runs one engine")
        local = 1
    first = start or 0
    last = first + (local or size - first)
    if not 0 <= first < last <= size <= MAX_ENGINES:
        parser.error(
            f"engines {first} to {last - 1} are not among the {size} of --data-parallel-size "
            f"(0 to {size - 1}, {MAX_ENGINES} at most)"
        )
    return range(first, last)


def _port(text: str) -> int:
    port = integer(text)
    if not 0 < port < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return port


def _address(text: str) -> str:
    try:
        stream_socket(text)[0].close()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
