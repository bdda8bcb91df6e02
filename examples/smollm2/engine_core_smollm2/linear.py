"""Matrix products with the model's weights, and the threads that share them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Float32s = npt.NDArray[np.float32]

# Columns of a tile. A narrow tile makes each product small enough for the BLAS library's small-matrix
# kernels, which read the weights once and in order. A large product first copies them, which for a handful of
# tokens costs more than the arithmetic.
TILE = 32
# Multiplications below which waking another thread costs more than it helps.
WORTH_SHARING = 7_000_000


class Linear:
    """A weight matrix kept as tiles of output columns: (tiles, in_features, TILE)."""

    def __init__(self, weight: Float32s) -> None:
        """`weight` (out_features, in_features), as files hold it."""
        self.out_features, in_features = weight.shape
        tiles = -(-self.out_features // TILE)
        self._tiles = np.zeros((tiles, in_features, TILE), np.float32)
        whole = self.out_features // TILE
        self._tiles[:whole] = weight[: whole * TILE].reshape(whole, TILE, in_features).transpose(0, 2, 1)
        if whole < tiles:
            self._tiles[whole, :, : self.out_features % TILE] = weight[whole * TILE :].T

    def __call__(self, x: Float32s, threads: Threads | None = None) -> Float32s:
        """`x` (n, in_features) -> (n, out_features), the columns shared out among `threads` if it pays."""
        n, tiles = len(x), len(self._tiles)
        out = np.empty((n, tiles * TILE), np.float32)
        tiled = out.reshape(n, tiles, TILE).transpose(1, 0, 2)
        if threads is None or n * self._tiles.size < WORTH_SHARING:
            np.matmul(x, self._tiles, out=tiled)
        else:
            shares = slices(tiles, threads.count)
            threads.each(lambda part: np.matmul(x, self._tiles[part], out=tiled[part]), shares)
        return out[:, : self.out_features]


def slices(total: int, parts: int) -> list[slice]:
    """`total` items in at most `parts` consecutive shares of about equal size."""
    bounds = np.linspace(0, total, min(parts, total) + 1).astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(bounds)]


class Threads:
    """The calling thread and `count - 1` helpers. numpy lets them run at once inside its larger calls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = []
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        for number in range(1, count):
            inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._inboxes.append(inbox)
            threading.Thread(target=self._help, args=(inbox,), name=f"smollm2-{number}", daemon=True).start()

    def each(self, function: Callable[[T], Any], items: Sequence[T]) -> None:
        """Call `function` on each item, in no order, and return when all are done. Raises what it raised."""
        helpers = self._inboxes[: len(items) - 1]
        if not helpers:
            for item in items:
                function(item)
            return
        pending = deque(items)

        def drain() -> None:
            while True:
                try:
                    item = pending.popleft()
                except IndexError:
                    return
                function(item)

        for inbox in helpers:
            inbox.put(drain)
        try:
            drain()
        finally:
            errors = [error for error in [self._done.get() for _ in helpers] if error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let the helpers go."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []
        self.count = 1

    def _help(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := inbox.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
