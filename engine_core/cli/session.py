"""A client for the length of a command: of an engine that it launches, or of one that runs already."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import uvloop

from engine_core.client import AsyncEngineClient
from engine_core.config import EngineConfig


def add_connect_option(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Which engine")
    group.add_argument(
        "--connect",
        metavar="ADDRESS",
        help="a running engine, by the address that `engine-core serve` printed; without it, one is started "
        "with the options below and stopped at the end",
    )


@contextlib.asynccontextmanager
async def open_client(
    address: str | None, config: EngineConfig, log_level: str
) -> AsyncIterator[AsyncEngineClient]:
    """Connects to `address`; without one, launches an engine with `config` that logs from `log_level` on."""
    if address is None:
        async with AsyncEngineClient.launch(config, log_level=log_level) as client:
            yield client
    else:
        async with AsyncEngineClient.connect(address) as client:
            yield client


def run_until_done(main: Coroutine[Any, Any, int]) -> int:
    """Runs an asynchronous command. Ctrl-C and SIGTERM cancel it, so that it ends what it has started.

    Raises KeyboardInterrupt if that is how it ended.
    """
    return uvloop.run(_cancelled_by_signals(main))


async def _cancelled_by_signals(main: Coroutine[Any, Any, int]) -> int:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
