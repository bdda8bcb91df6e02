"""Quantities over the time of a simulation, in a bounded number of buckets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST_BUCKETS = 256


class Timeline:
    """Sums of named quantities by bucket of time. When the buckets run out, neighbours are merged.

    `spread` is for states (divide by the width for the average), `count` for events.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.width_s = 0.125
        self._rows = {name: row for row, name in enumerate(names)}
        self._sums = np.zeros((len(names), MOST_BUCKETS))
        self._end_s = 0.0

    def count(self, at_s: float, amounts: tuple[float, ...], first: int) -> None:
        """Adds `amounts` to the quantities from number `first` on, at a moment."""
        self._make_room(at_s)
        bucket = min(int(at_s / self.width_s), MOST_BUCKETS - 1)
        for row, amount in enumerate(amounts, first):
            self._sums[row, bucket] += amount

    def spread(self, start_s: float, end_s: float, levels: tuple[float, ...]) -> None:
        """The first quantities had these `levels` from `start_s` to `end_s`: adds level * seconds."""
        self._make_room(end_s)
        column = np.array(levels)
        while start_s < end_s:
            bucket = min(int(start_s / self.width_s), MOST_BUCKETS - 1)
            # Exact, and beyond start_s, because the width is a power of two.
            stop_s = min(end_s, (bucket + 1) * self.width_s)
            self._sums[: len(levels), bucket] += column * (stop_s - start_s)
            start_s = stop_s

    def _make_room(self, until_s: float) -> None:
        self._end_s = max(self._end_s, until_s)
        while until_s > MOST_BUCKETS * self.width_s:
            half = self._sums[:, 0::2] + self._sums[:, 1::2]
            self._sums = np.concatenate((half, np.zeros_like(half)), axis=1)
            self.width_s *= 2

    def starts_s(self) -> npt.NDArray[np.float64]:
        """When each bucket of `sums` begins."""
        return np.linspace(0.0, self._num_buckets() * self.width_s, self._num_buckets(), endpoint=False)

    def sums(self, name: str) -> npt.NDArray[np.float64]:
        """What a quantity amounts to in each bucket, up to the last one that was touched."""
        return self._sums[self._rows[name], : self._num_buckets()]

    def _num_buckets(self) -> int:
        return min(MOST_BUCKETS, int(self._end_s / self.width_s) + 1)
