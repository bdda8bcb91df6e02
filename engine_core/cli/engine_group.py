"""Several engines on one host, each a process: they start together, and end together."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from transport.processes import die_with_parent

logger = logging.getLogger("engine_core")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_group(engines: Sequence[Callable[[], int]], on_running: Callable[[], None] | None = None) -> int:
    """Runs each engine in a process of its own until one ends; then the others are asked to.

    Signals are passed on as they come. Returns the exit status of the engine that ended first. Must be called
    before the process has other threads; `on_running` may make some.
    """
    parent = os.getpid()
    pids: dict[int, int] = {}  # pid -> position
    for position, engine in enumerate(engines):
        pid = os.fork()
        if pid == 0:
            _be_engine(engine, parent)
        pids[pid] = position

    asked = False

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        for pid in pids:
            os.kill(pid, signum)

    previous = {signum: signal.signal(signum, forward) for signum in _STOP_SIGNALS}
    status: int | None = None
    if on_running is not None:
        on_running()
    try:
        while pids:
            pid, wait_status = os.wait()
            position = pids.pop(pid)
            code = os.waitstatus_to_exitcode(wait_status)
            if status is None:
                status = code if code >= 0 else 128 - code
                if pids:
                    logger.info(
                        "engine %d of %d has ended (%d); stopping the others", position, len(engines), code
                    )
                    forward(signal.SIGTERM, None)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return status or 0


def _be_engine(engine: Callable[[], int], parent: int) -> None:
    """The child's side of the fork: never returns into the caller's frames."""
    status = 1
    try:
        # Out of the terminal's process group: the parent passes on what the terminal sends.
        os.setpgid(0, 0)
        die_with_parent(parent)
        status = engine()
    except BaseException as error:
        logger.error("the engine failed: %s", error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
