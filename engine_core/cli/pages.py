"""Finds the state pages that the command line looks at."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from transport.state_page import PageLocation, PageView, StatePage, StatePageError


def add_engine_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "engine",
        nargs="?",
        metavar="PID|FILE",
        help="process id of the engine, or a file with a copy of its state page (default: the only engine of "
        "this host)",
    )


def find_engines() -> list[PageLocation]:
    """All engines of this user. Ranks that somebody uses without an engine have a page, too; it does not
    count.
    """
    return [place for place in StatePage.find() if place.engine_pid]


def open_page(target: str | None) -> PageView:
    """The page of an engine by pid or file, or of the only one. Raises StatePageError, OSError."""
    if target is not None:
        return StatePage.open(int(target)) if target.isdigit() else StatePage.open(Path(target))
    places = find_engines()
    if not places:
        raise StatePageError("no engine of this user runs on this host")
    if len(places) > 1:
        pids = ", ".join(str(place.engine_pid) for place in places)
        raise StatePageError(f"several engines run on this host, name one of them: {pids}")
    return StatePage.open(places[0].path)


def lobby_address(target: str | None) -> str:
    """Where clients connect to an engine by pid, or to the only one. Raises StatePageError, OSError."""
    with open_page(target) as page:
        engine = page.snapshot()["engine"]
    address: str = engine["address"]
    if not address:
        raise StatePageError(
            f"engine {engine['pid']} has no lobby to connect to: it is its front end's, or its launcher's "
            "(--listen gives it one)"
        )
    return address


@contextlib.contextmanager
def open_engines() -> Iterator[list[PageView]]:
    """The pages of all engines."""
    with contextlib.ExitStack() as stack:
        pages = []
        for place in find_engines():
            with contextlib.suppress(FileNotFoundError, StatePageError):  # it has just ended
                pages.append(stack.enter_context(StatePage.open(place.path)))
        yield pages
