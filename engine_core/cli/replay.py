"""Send recorded traffic to an engine at its recorded times, and report how it was served.

Reads Mooncake's JSON lines and Azure's CSV. Prompts are made up from the trace, always the same ones, and
share prefixes where the recorded prompts did. Every token is checked if the engine's worker is the mock.
Without sizes on the command line, an engine that is started gets a KV cache in which nothing of the trace
needs to be evicted.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from engine_core.cli.messages import say
from engine_core.cli.options import add_engine_options, engine_config, given
from engine_core.cli.parser import Parser, positive_float, positive_integer
from engine_core.cli.progress import make_progress
from engine_core.cli.session import add_connect_option, open_client, run_until_done
from engine_core.client import AsyncEngineClient
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError
from engine_core.replay.driver import Replay
from engine_core.replay.prefix import unbounded_prefix_hits
from engine_core.replay.report import make_report, table
from engine_core.replay.traces import HASH_BLOCK_TOKENS, TraceRequest, load_trace
from executor.mock_model import mock_tokens
from executor.mock_worker import MockOptions
from transport.clock import SYSTEM_CLOCK

_ANSWER_TIMEOUT_S = 60.0  # of a utility call


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Replay")
    group.add_argument("trace", metavar="TRACE", help="Mooncake JSON lines or Azure CSV")
    group.add_argument(
        "--speed", type=positive_float, default=1.0, metavar="X", help="send X times as fast as recorded"
    )
    group.add_argument(
        "--max-requests",
        type=positive_integer,
        metavar="N",
        help="the first N only (default: all)",
    )
    group.add_argument(
        "--max-concurrency",
        type=positive_integer,
        metavar="N",
        help="unanswered requests at a time; others are sent late (default: no limit)",
    )
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_connect_option(parser)
    add_engine_options(parser)


def run(parser: Parser, args: argparse.Namespace) -> int:
    requests = load_trace(args.trace, args.max_requests)
    config = engine_config(parser, args, **({} if args.connect else roomy(requests, given(args))))
    return run_until_done(_replay(args, requests, config))


def roomy(requests: Sequence[TraceRequest], chosen: dict[str, Any]) -> dict[str, Any]:
    """Sizes for an engine in which every request of the trace fits and nothing is evicted.

    `chosen` are the options that the user gave; a KV cache of a size given there is left alone.
    """
    longest = max(request.input_length + request.output_length for request in requests)
    block_size = chosen.get("block_size", EngineConfig().block_size)
    tokens = sum(request.input_length + request.output_length for request in requests)
    hits = unbounded_prefix_hits(requests, block_size) if HASH_BLOCK_TOKENS % block_size == 0 else [0]
    # Each request may end in a block that is not full; block 0 is the null block.
    blocks = 1 + len(requests) + -(-(tokens - sum(hits)) // block_size)
    return {
        "num_gpu_blocks_override": blocks,
        "worker_options": {"mock_max_model_len": max(longest, MockOptions().mock_max_model_len)},
    }


async def _replay(args: argparse.Namespace, requests: list[TraceRequest], config: EngineConfig) -> int:
    clock = SYSTEM_CLOCK
    begun_s = clock.monotonic()
    async with open_client(args.connect, config, args.log_level) as client:
        info = client.info
        if args.connect is None:
            say(
                f"engine ready after {clock.monotonic() - begun_s:.1f} s: {info.world_size} worker rank(s), "
                f"{info.num_gpu_blocks:,} KV blocks of {info.block_size} tokens"
            )
        if info.vocab_size is None:
            raise ValueError(f"the engine at {args.connect} does not say how large its vocabulary is")
        steps_before = await _steps(client)
        progress = make_progress(len(requests))
        with progress:
            replay = Replay(
                client,
                requests,
                vocab_size=info.vocab_size,
                speed=args.speed,
                max_concurrency=args.max_concurrency,
                on_progress=progress,
            )
            ended: BaseException | None = None
            try:
                await replay.run()
            except (EngineDeadError, asyncio.CancelledError) as error:
                ended = error
            wall_s = clock.monotonic() - replay.started_s
        steps = None if isinstance(ended, EngineDeadError) else await _steps(client) - steps_before
    report = make_report(
        replay.records,
        num_requests=len(requests),
        wall_s=wall_s,
        vocab_size=info.vocab_size,
        tokens_of=partial(mock_tokens, vocab_size=info.vocab_size) if _is_mock(info.worker_cls) else None,
        unbounded_hits=unbounded_prefix_hits(requests, info.block_size)
        if HASH_BLOCK_TOKENS % info.block_size == 0
        else None,
        engine_steps=steps,
    )
    print(msgspec.json.encode(report).decode() if args.json else table(report))
    if ended is not None:
        raise ended
    return 0 if report.ok else 1


async def _steps(client: AsyncEngineClient) -> int:
    """That the engine has executed since its start."""
    counters: dict[str, int] = await client.utility("get_counters", timeout_s=_ANSWER_TIMEOUT_S)
    return counters["steps"]


def _is_mock(worker_cls: str | None) -> bool:
    return worker_cls is not None and worker_cls.replace(":", ".") == "executor.mock_worker.MockWorker"
