"""What the command line says to people: one line each, on stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """An exception as one line: the first, where evidence such as a worker's last words follows."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
