"""What the command line says to people: one line each, on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes a file: the kernel's errors get its name, which those of write() lack."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def describe(error: BaseException) -> str:
    """An exception as one line: the first, where evidence such as a worker's last words follows."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
