"""Public request traces, and the prompts they stand for.

Two formats: Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`) and
Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`). Neither holds text. Prompts are made up from what
is there, always the same ones, and share prefixes exactly where the recorded service's did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol, TextIO

import msgspec
import numpy as np
import numpy.typing as npt

HASH_BLOCK_TOKENS = 512  # what one of Mooncake's hash ids stands for
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceError(ValueError):
    """A trace cannot be read; names the line."""

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class TraceRequest(msgspec.Struct, frozen=True):
    """One recorded request."""

    row: int  # 0-based position in the trace
    arrival_s: float  # since the first request
    input_length: int  # tokens, >= 1
    output_length: int  # tokens, >= 1
    hash_ids: list[int] | None = None  # Mooncake: one per 512 prompt tokens, the last of them cut

    def prompt(self, vocab_size: int) -> npt.NDArray[np.int32]:
        """(input_length,) token ids in [0, vocab_size).

        With hash ids, each stands for 512 tokens that depend on that id alone. Without, the row number
        seeds a generator.
        """
        if self.hash_ids is None:
            generator = np.random.default_rng(self.row)
            return generator.integers(0, vocab_size, self.input_length, dtype=np.int32)
        ids = np.array(self.hash_ids, np.uint64)
        positions = (
            ids[:, None] * np.uint64(HASH_BLOCK_TOKENS) + np.arange(HASH_BLOCK_TOKENS, dtype=np.uint64)
        ).ravel()
        return np.asarray(_mix(positions[: self.input_length]) % np.uint64(vocab_size), np.int32)


BadLine = Callable[["TraceError"], None]  # told of a line that is passed over


def load_trace(
    path: str | Path, max_requests: int | None = None, on_bad_line: BadLine | None = None
) -> list[TraceRequest]:
    """The first `max_requests` requests of a trace file, in its order; the format is told from the first
    line.

    Raises OSError, and `TraceError` with the line for a file that is not a trace or holds no request. A
    malformed line also raises, unless there is `on_bad_line`: then it is passed over.
    """
    name = str(path)
    with open(path, encoding="utf-8", newline=None) as file:
        try:
            if file.readline().strip() == _AZURE_HEADER:
                rows = _requests(_AzureLines(name), file, 2, on_bad_line)
            else:
                file.seek(0)
                rows = _requests(_MooncakeLines(name), file, 1, on_bad_line)
            requests = list(islice(rows, max_requests))
        except UnicodeDecodeError:
            raise TraceError(name, 1, "is not text; expected Mooncake JSON lines or an Azure CSV") from None
    if not requests and max_requests != 0:
        raise TraceError(name, 1, "holds no request")
    return requests


class _Lines(Protocol):
    path: str

    def parse(self, number: int, text: str, row: int) -> TraceRequest:
        """Raises `TraceError`."""
        ...


def _requests(lines: _Lines, file: TextIO, first: int, on_bad_line: BadLine | None) -> Iterator[TraceRequest]:
    """The requests of what is left of `file`, whose next line has number `first`."""
    row = 0
    previous_s = 0.0
    for number, text in enumerate(file, first):
        if not text.strip():
            continue
        try:
            request = lines.parse(number, text, row)
            _check(lines.path, number, request, previous_s)
        except TraceError as error:
            if on_bad_line is None:
                raise
            on_bad_line(error)
            continue
        yield request
        previous_s = request.arrival_s
        row += 1


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _MooncakeLines:
    def __init__(self, path: str) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(_MooncakeLine)
        self._start_ms: float | None = None

    def parse(self, number: int, text: str, row: int) -> TraceRequest:
        try:
            line = self._decoder.decode(text)
        except msgspec.DecodeError as error:  # also what does not have the fields
            raise TraceError(self.path, number, str(error).replace("`", "")) from None
        blocks = -(-line.input_length // HASH_BLOCK_TOKENS)
        if line.input_length > 0 and (len(line.hash_ids) != blocks or min(line.hash_ids) < 0):
            raise TraceError(
                self.path,
                number,
                f"{line.input_length} tokens need {blocks} hash_ids >= 0, found {len(line.hash_ids)}",
            )
        if self._start_ms is None:
            self._start_ms = line.timestamp
        arrival_s = (line.timestamp - self._start_ms) / 1e3
        return TraceRequest(row, arrival_s, line.input_length, line.output_length, line.hash_ids)


class _AzureLines:
    def __init__(self, path: str) -> None:
        self.path = path
        self._start: np.datetime64 | None = None

    def parse(self, number: int, text: str, row: int) -> TraceRequest:
        try:
            timestamp, context, generated = text.strip().split(",")
            when = np.datetime64(timestamp, "ns")
            lengths = int(context), int(generated)
        except ValueError:
            raise TraceError(self.path, number, f"expected {_AZURE_HEADER}, found {text.strip()!r}") from None
        if self._start is None:
            self._start = when
        return TraceRequest(row, float((when - self._start) / np.timedelta64(1, "s")), *lengths)


def _check(path: str, number: int, request: TraceRequest, previous_s: float) -> None:
    if request.input_length < 1:
        raise TraceError(
            path, number, f"the prompt must have at least one token, found {request.input_length}"
        )
    if request.output_length < 1:
        raise TraceError(
            path, number, f"the output must have at least one token, found {request.output_length}"
        )
    if not request.arrival_s >= previous_s:
        raise TraceError(path, number, "arrives before the request above it")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatters consecutive numbers over 64 bits (the finaliser of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
