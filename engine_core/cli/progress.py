"""Progress of a replay on stderr: a bar where a person looks at a terminal and rich is installed, else a
line at times.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, Protocol

from engine_core.cli.messages import say
from engine_core.replay.driver import Replay
from transport.clock import SYSTEM_CLOCK, Clock

_LINE_EVERY_S = 2.0
_DRAW_EVERY_S = 0.1  # a look at the clock for each token is cheap, drawing is not


class Progress(Protocol):
    """Called with every delta; a context manager that leaves the terminal clean."""

    def __call__(self, replay: Replay) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> None: ...


def make_progress(total: int) -> Progress:
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return _Bar(total)
    return _Lines()


class _Lines:
    """A line every two seconds."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._next_s = clock.monotonic() + _LINE_EVERY_S

    def __call__(self, replay: Replay) -> None:
        now_s = self._clock.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _LINE_EVERY_S
            say(
                f"{replay.num_done} of {len(replay.requests)} requests done, {len(replay.records)} sent, "
                f"{replay.num_output_tokens:,} tokens, {now_s - replay.started_s:.0f} s"
            )

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Bar:
    """A bar, drawn by rich."""

    def __init__(self, total: int, clock: Clock = SYSTEM_CLOCK) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._clock = clock
        self._next_s = 0.0
        self._bar: Any = RichProgress(
            TextColumn("replaying"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, detail="")

    def __call__(self, replay: Replay) -> None:
        now_s = self._clock.monotonic()
        if now_s >= self._next_s or replay.num_done == len(replay.requests):
            self._next_s = now_s + _DRAW_EVERY_S
            rate = replay.num_output_tokens / max(now_s - replay.started_s, 1e-3)
            detail = f"{len(replay.records) - replay.num_done} running · {rate:,.0f} tokens/s"
            self._bar.update(self._task, completed=replay.num_done, detail=detail)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
