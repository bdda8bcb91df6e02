"""Generated traffic: arrivals at a rate, lengths from distributions, prompts that share prefixes.

A load is an iterable of `TraceRequest`s in order of arrival, made one by one as they are asked for, and
the same ones each time for the same seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.replay.traces import HASH_BLOCK_TOKENS, TraceRequest

_CHUNK = 1024  # random numbers drawn at a time


class LoadError(ValueError):
    """A load cannot be generated from what was asked for."""


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of token counts, rounded, at least 1.

    `parse_lengths` reads it from `512`, `uniform:LOW:HIGH` (both ends included), `exponential:MEAN` or
    `lognormal:MEDIAN:SIGMA` (sigma of the natural logarithm).
    """

    kind: Literal["constant", "uniform", "exponential", "lognormal"]
    first: float
    second: float = 0.0

    def draw(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """(count,)"""
        if self.kind == "constant":
            lengths = np.full(count, self.first)
        elif self.kind == "uniform":
            lengths = generator.integers(int(self.first), int(self.second), count, endpoint=True)
        elif self.kind == "exponential":
            lengths = generator.exponential(self.first, count)
        else:
            lengths = generator.lognormal(np.log(self.first), self.second, count)
        drawn: npt.NDArray[np.int64] = np.maximum(np.rint(lengths), 1).astype(np.int64)
        return drawn


_PARAMETERS = {"constant": 1, "uniform": 2, "exponential": 1, "lognormal": 2}


def parse_lengths(text: str) -> Lengths:
    """Raises `LoadError`."""
    kind, *values = text.split(":")
    if not values:
        kind, values = "constant", [kind]
    if kind not in _PARAMETERS or len(values) != _PARAMETERS[kind]:
        raise LoadError(f"{text!r} must read N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA")
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        raise LoadError(f"{text!r} holds what is no number") from None
    first, second = numbers[0], numbers[-1]
    if not (1 <= first < np.inf) or not (0 <= second < np.inf) or (kind == "uniform" and second < first):
        raise LoadError(f"{text!r}: lengths begin at 1 and must ascend")
    return Lengths(kind, *numbers)  # type: ignore[arg-type]  # one of the keys above


class GeneratedRequest(TraceRequest, frozen=True):
    """Its first `prefix_length` tokens are those of every request of its group; the others are its own."""

    group: int = 0
    prefix_length: int = 0

    def prompt(self, vocab_size: int) -> npt.NDArray[np.int32]:
        shared = np.random.default_rng([1, self.group]).integers(
            0, vocab_size, self.prefix_length, dtype=np.int32
        )
        own = np.random.default_rng([2, self.row]).integers(
            0, vocab_size, self.input_length - self.prefix_length, dtype=np.int32
        )
        return np.concatenate((shared, own))


class GeneratedLoad(msgspec.Struct, kw_only=True, frozen=True):
    """`num_requests` requests at `rate` a second on average."""

    rate: float
    num_requests: int
    input_lengths: Lengths
    output_lengths: Lengths
    # Gaps between arrivals: a gamma distribution whose standard deviation is this many times its mean.
    # 1 is a Poisson process, 0 a metronome, more is bursty.
    burstiness: float = 1.0
    shared_prefix_ratio: float = 0.0  # share of each prompt that is its group's
    prefix_groups: int = 1
    seed: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        """Each time from the start. The lengths do not depend on the rate, so that rates can be compared."""
        gaps_of, lengths_of = (np.random.default_rng([self.seed, stream]) for stream in range(2))
        arrival_s = 0.0
        for start in range(0, self.num_requests, _CHUNK):
            inputs = self.input_lengths.draw(lengths_of, _CHUNK).tolist()
            outputs = self.output_lengths.draw(lengths_of, _CHUNK).tolist()
            groups = lengths_of.integers(0, self.prefix_groups, _CHUNK).tolist()
            gaps = self._gaps(gaps_of)
            for index in range(min(_CHUNK, self.num_requests - start)):
                yield GeneratedRequest(
                    row=start + index,
                    arrival_s=arrival_s,
                    input_length=inputs[index],
                    output_length=outputs[index],
                    group=groups[index],
                    prefix_length=int(inputs[index] * self.shared_prefix_ratio),
                )
                arrival_s += gaps[index] / self.rate

    def _gaps(self, generator: np.random.Generator) -> list[float]:
        """(_CHUNK,) of mean 1"""
        if not self.burstiness:
            return [1.0] * _CHUNK
        shape = self.burstiness**-2
        gaps: list[float] = generator.gamma(shape, 1 / shape, _CHUNK).tolist()
        return gaps


def at_rate(requests: list[TraceRequest], rate: float) -> Iterator[TraceRequest]:
    """The requests of a trace at another average rate (a second): their gaps are stretched alike.

    Raises `LoadError` for a trace without duration.
    """
    duration_s = requests[-1].arrival_s
    if not duration_s:
        raise LoadError("all requests of the trace arrive at once; it has no rate to change")
    return at_speed(requests, rate * duration_s / len(requests))


def at_speed(requests: Iterable[TraceRequest], speed: float) -> Iterator[TraceRequest]:
    """The requests with their arrival times divided by `speed`."""
    for request in requests:
        yield msgspec.structs.replace(request, arrival_s=request.arrival_s / speed)


def segments(request: TraceRequest) -> Iterator[tuple[bytes, int]]:
    """What the prompt is made of: names of contents, and how many tokens of each, from its first on.

    Equal names stand for equal tokens.
    """
    if isinstance(request, GeneratedRequest):
        if request.prefix_length:
            yield b"g%d" % request.group, request.prefix_length
        if request.input_length > request.prefix_length:
            yield b"r%d" % request.row, request.input_length - request.prefix_length
    elif request.hash_ids is None:
        yield b"r%d" % request.row, request.input_length
    else:
        left = request.input_length
        for hash_id in request.hash_ids:
            yield b"h%d" % hash_id, min(left, HASH_BLOCK_TOKENS)
            left -= HASH_BLOCK_TOKENS


def block_names(request: TraceRequest, block_size: int) -> list[bytes]:
    """Names of the full blocks of the prompt, which are equal exactly where all tokens up to their end are.

    They stand for the hashes of the token ids, without there being token ids.
    """
    names: list[bytes] = []
    chain = b""
    end = 0
    for content, length in segments(request):
        # Names what came before in full, then the content that the block ends in.
        chain = hashlib.blake2b(chain + content, digest_size=16).digest()
        end += length
        names += [chain + number.to_bytes(4, "little") for number in range(len(names), end // block_size)]
    return names
