"""Argument parsing with one-line errors, and values as vLLM's command line reads them."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any, NoReturn

_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}


class Parser(argparse.ArgumentParser):
    """Exits with status 2 and one line that names the flag and the value; flags are never guessed from a
    prefix."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends an option's default, unless its help already speaks of one or there is none to speak of."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if "default" in text or action.default in (None, False, "", [], argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"


def integer(text: str) -> int:
    """An int, with vLLM's suffixes: 1k = 1000, 1K = 1024, 25.6k = 25600."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT])", text.strip())
    try:
        if match is None:
            return int(text)
        number, factor = match[1], _SUFFIXES[match[2]]
        value = float(number) * factor
        if "." in number and (match[2].isupper() or value != int(value)):
            raise ValueError
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}") from None


def positive_integer(text: str) -> int:
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def key_value(text: str) -> tuple[str, Any]:
    """`name=value`; the value is JSON if it reads as such, else the text itself."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} must read name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
