"""How long a step takes the workers, as a function of what the step holds.

Three models: an affine function, a table measured by `engine-core profile-worker`, and a Python callable.
`parse_latency` makes one from the text of an option.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from executor.imports import import_object
from executor.step import Int32s, SchedulerOutput

Float64s = npt.NDArray[np.float64]


class LatencyError(ValueError):
    """A latency model cannot be had, or gave a time that is none."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step asks of the workers. A row that computes one token counts as decoding."""

    num_scheduled_tokens: Int32s  # (n,) by row
    num_computed_tokens: Int32s  # (n,) before the step
    prefill_tokens: int  # of rows that compute more than one token
    decode_seqs: int
    kv_tokens: int  # tokens whose KV is read: of every row, all up to the last it computes

    @classmethod
    def of(cls, step: SchedulerOutput) -> StepShape:
        counts = step.num_scheduled_tokens
        total = int(counts.sum())
        decode_seqs = int(np.count_nonzero(counts == 1))
        kv_tokens = int(step.num_computed_tokens.sum(dtype=np.int64)) + total
        return cls(counts, step.num_computed_tokens, total - decode_seqs, decode_seqs, kv_tokens)

    @property
    def mean_context(self) -> float:
        """Tokens computed before the step, on the rows' average. Only for a step that has rows."""
        before = self.kv_tokens - self.prefill_tokens - self.decode_seqs
        return before / len(self.num_scheduled_tokens)


LatencyModel = Callable[[StepShape], float]  # seconds


class AffineLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`step_ms + prefill_us_per_token * prefill tokens + decode_us_per_seq * decoding rows + kv_ns_per_token
    * KV tokens read`."""

    step_ms: float = 0.0
    prefill_us_per_token: float = 0.0
    decode_us_per_seq: float = 0.0
    kv_ns_per_token: float = 0.0

    def __call__(self, shape: StepShape) -> float:
        return (
            self.step_ms * 1e-3
            + self.prefill_us_per_token * 1e-6 * shape.prefill_tokens
            + self.decode_us_per_seq * 1e-6 * shape.decode_seqs
            + self.kv_ns_per_token * 1e-9 * shape.kv_tokens
        )


TABLE_FORMAT = "engine-core latency table 1"


class LatencyTable(msgspec.Struct, kw_only=True):
    """Times of a real worker, as `profile-worker` writes them: one for each point of a grid."""

    format: str
    worker_cls: str
    model: str
    prefill_tokens: list[int]  # axis 0, ascending, from 0
    decode_seqs: list[int]  # axis 1, ascending, from 0
    context: list[int]  # axis 2, ascending: tokens computed before the step, on the rows' average
    step_s: list[list[list[float]]]  # median seconds of a step


class TableLatency:
    """Interpolates linearly between the points of a table, and goes on straight beyond its last ones."""

    def __init__(self, table: LatencyTable) -> None:
        axes = (table.prefill_tokens, table.decode_seqs, table.context)
        times = np.array(table.step_s, np.float64) if _is_grid(table) else np.empty(0)
        if times.shape != tuple(len(axis) for axis in axes) or not all(axes):
            raise LatencyError("step_s is no grid over prefill_tokens x decode_seqs x context")
        if any(a >= b for axis in axes for a, b in pairwise(axis)):
            raise LatencyError("the axes of the table must ascend")
        if not np.isfinite(times).all() or (times < 0).any():
            raise LatencyError("step_s holds times that are negative or not finite")
        self._axes = [np.array(axis, np.float64) for axis in axes]
        self._times: Float64s = times

    def __call__(self, shape: StepShape) -> float:
        if not len(shape.num_scheduled_tokens):
            return 0.0
        times: Float64s = self._times
        for axis, at in zip(
            self._axes, (shape.prefill_tokens, shape.decode_seqs, shape.mean_context), strict=True
        ):
            if len(axis) == 1:
                times = times[0]
                continue
            left = min(max(int(np.searchsorted(axis, at, side="right")) - 1, 0), len(axis) - 2)
            share = max((at - axis[left]) / (axis[left + 1] - axis[left]), 0.0)
            times = times[left] + share * (times[left + 1] - times[left])
        return max(float(times), 0.0)


def _is_grid(table: LatencyTable) -> bool:
    rows = {len(row) for plane in table.step_s for row in plane}
    return len({len(plane) for plane in table.step_s}) == 1 and len(rows) == 1


def load_table(path: str | Path) -> TableLatency:
    """Raises OSError, and `LatencyError` for a file that `profile-worker` did not write."""
    try:
        table = msgspec.json.decode(Path(path).read_bytes(), type=LatencyTable)
    except msgspec.DecodeError as error:
        raise LatencyError(f"{path} is no latency table: {str(error).replace('`', '')}") from None
    if table.format != TABLE_FORMAT:
        raise LatencyError(
            f"{path} is no latency table: its format is {table.format!r}, not {TABLE_FORMAT!r}"
        )
    try:
        return TableLatency(table)
    except LatencyError as error:
        raise LatencyError(f"{path}: {error}") from None


def parse_latency(text: str) -> LatencyModel:
    """The model that an option names: `step_ms=5,prefill_us_per_token=20` (affine, absent terms are 0),
    `FILE.json` (a measured table), or `package.module:function` (called with a `StepShape`, returns seconds).

    Raises `LatencyError`, and OSError for a table that cannot be read.
    """
    if text.endswith(".json"):
        return load_table(text)
    if "=" in text:
        return _parse_affine(text)
    model = import_object(text, lambda reason: LatencyError(f"{text}: {reason}"))
    if not callable(model):
        raise LatencyError(f"{text} cannot be called")

    def checked(shape: StepShape) -> float:
        seconds = model(shape)
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise LatencyError(f"{text} returned {seconds!r} for a step; expected seconds >= 0")
        return float(seconds)

    return checked


def _parse_affine(text: str) -> AffineLatency:
    names = AffineLatency.__struct_fields__
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            terms[name.strip()] = number = float(value)
        except ValueError:
            raise LatencyError(f"{part!r} must read name=number") from None
        if name.strip() not in names:
            raise LatencyError(f"there is no term {name.strip()!r}; there are {', '.join(names)}")
        if not 0 <= number < math.inf:
            raise LatencyError(f"{part!r}: must be 0 or more")
    return AffineLatency(**terms)
