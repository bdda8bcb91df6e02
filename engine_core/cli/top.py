"""Watch the engines of this host, live.

Everything shown is read from the engines' state pages: it needs nothing of the engine, and works as well on
one that hangs or has died. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from engine_core import health
from engine_core.cli.pages import add_engine_argument, find_engines, open_page
from engine_core.cli.parser import Parser, positive_float
from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_page import PageView, StatePage, StatePageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_KEPT = 240  # looks
_WIDTH = 110  # where there is no terminal


def add_arguments(parser: Parser) -> None:
    add_engine_argument(parser)
    parser.add_argument(
        "--interval",
        type=positive_float,
        default=1.0,
        metavar="N",
        help="seconds from one look to the next; rates are of this time",
    )
    parser.add_argument("--once", action="store_true", help="print one picture, after one interval, and end")
    parser.add_argument("--svg", metavar="FILE", help="with --once: write the picture to this file")


def run(parser: Parser, args: argparse.Namespace) -> int:
    if args.svg and not args.once:
        parser.error("--svg FILE: is for one picture, with --once")
    if importlib.util.find_spec("rich") is None:
        raise RuntimeError("top needs the rich package: pip install 'engine-core[cli]'")
    watch = Watch(args.engine)
    try:
        watch.look()
        if args.once or not sys.stdout.isatty():  # what is no terminal cannot be drawn anew
            return _print_once(watch, args.interval, args.svg)
        _follow(watch, args.interval)
        return 0
    finally:
        watch.close()


def _print_once(watch: Watch, interval_s: float, svg: str | None) -> int:
    from rich.console import Console

    threading.Event().wait(interval_s)
    watch.look()
    console = Console(record=svg is not None, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(watch.render(console))
    if svg is not None:
        console.save_svg(svg, title="engine-core top")
    return 0


def _follow(watch: Watch, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    never = threading.Event()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(watch.render(console), refresh=True)
            never.wait(interval_s)
            watch.look()


class Watch:
    """The engines being watched: the one that was named, or all there are, each until the end."""

    def __init__(self, target: str | None, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises StatePageError or OSError if the engine that is named has no page."""
        self._clock = clock
        self._engines: dict[tuple[int, int], EngineWatch] = {}
        self._follows_all = target is None
        if target is not None:
            self._add(open_page(target))

    def look(self) -> None:
        if self._follows_all:
            for place in find_engines():
                with contextlib.suppress(FileNotFoundError, StatePageError):  # it has just ended
                    self._add(StatePage.open(place.path))
        for engine in self._engines.values():
            engine.look()

    def render(self, console: Console) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from engine_core.cli.engine_picture import picture

        if not self._engines:
            return Text("no engine of this user runs on this host", style="dim")
        return Group(*(picture(engine, console.width) for engine in self._engines.values()))

    def close(self) -> None:
        for engine in self._engines.values():
            engine.page.close()

    def _add(self, page: PageView) -> None:
        engine = page.snapshot()["engine"]
        key = (engine["pid"], engine["start_ticks"])
        if key in self._engines:
            page.close()
        else:
            self._engines[key] = EngineWatch(page, self._clock)


class EngineWatch:
    """One engine, now and over the last looks."""

    def __init__(self, page: PageView, clock: Clock) -> None:
        self.page = page
        self._clock = clock
        self.now_s = clock.monotonic()
        self.now_unix_s = clock.time()
        self.snapshot = page.snapshot()
        self.prompt_rate: deque[float] = deque(maxlen=_KEPT)  # tokens computed per second
        self.generation_rate: deque[float] = deque(maxlen=_KEPT)
        self.kv_usage: deque[float] = deque(maxlen=_KEPT)  # 0 to 1
        self.hit_rate: deque[float] = deque(maxlen=_KEPT)  # of the last look that had look-ups
        self.step_rate = 0.0

    @property
    def engine(self) -> dict[str, Any]:
        row: dict[str, Any] = self.snapshot["engine"]
        return row

    @property
    def ranks(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.snapshot["ranks"]
        return rows

    def look(self) -> None:
        before, before_s = self.engine, self.now_s
        self.snapshot = self.page.snapshot()
        self.now_s, self.now_unix_s = self._clock.monotonic(), self._clock.time()
        after = self.engine
        seconds = self.now_s - before_s
        if seconds <= 0 or not after["num_blocks"]:
            return

        def since(name: str) -> int:
            return int(after[name] - before[name])

        self.prompt_rate.append((since("prompt_tokens") - since("cached_tokens")) / seconds)
        self.generation_rate.append(since("generation_tokens") / seconds)
        self.step_rate = since("step_id") / seconds
        self.kv_usage.append(after["blocks_used"] / max(1, after["blocks_used"] + after["blocks_free"]))
        queries = since("prefix_queries")
        if queries:
            self.hit_rate.append(since("prefix_hits") / queries)
        elif self.hit_rate:
            self.hit_rate.append(self.hit_rate[-1])

    def verdicts(self) -> list[health.Verdict]:
        return [health.live(self.snapshot, self.now_s), health.progress(self.snapshot, self.now_s)]
