"""Matrix products with the model's weights, and the threads that share them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
Float32s = npt.NDArray[np.float32]

# Columns of a tile. Large products first copy the weights into an order that suits the kernel, which for a
# handful of tokens costs more than the arithmetic. OpenBLAS has kernels that do without for small products,
# on some processors; a narrow tile is small enough for them.
TILE = 32
_SMALL_PRODUCT = 1_000_000  # multiplications
_HAS_SMALL_KERNELS = {"SkylakeX", "Cooperlake", "SapphireRapids"}
# Multiplications below which waking another thread costs more than it helps.
WORTH_SHARING = 7_000_000


@lru_cache(maxsize=1)
def blas() -> ThreadpoolController:
    """The BLAS library that numpy uses, to set its threads."""
    return ThreadpoolController()


def _rows_at_once(in_features: int) -> int:
    """Rows of a product with one tile that is small in this sense; all of them where there is nothing to
    gain."""
    if not any(library.get("architecture") in _HAS_SMALL_KERNELS for library in blas().info()):
        return 1 << 30
    return max(1, _SMALL_PRODUCT // (in_features * TILE))


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
        self._rows_at_once = _rows_at_once(in_features)

    def __call__(self, x: Float32s, threads: Threads | None = None) -> Float32s:
        """`x` (n, in_features) -> (n, out_features), the columns shared out among `threads` if it pays."""
        n, tiles = len(x), len(self._tiles)
        chunks = max(1, -(-n // self._rows_at_once))
        rows = -(-n // chunks)
        if chunks * rows > n:
            x = np.concatenate([x, np.zeros((chunks * rows - n, x.shape[1]), np.float32)])
        # Every tile meets all chunks of rows before its turn is over, so that it is read from memory once.
        left = x.reshape(chunks, rows, -1)
        right = self._tiles[:, None]
        out = np.empty((chunks * rows, tiles * TILE), np.float32)
        tiled = out.reshape(chunks, rows, tiles, TILE).transpose(2, 0, 1, 3)
        if threads is None or n * self._tiles.size < WORTH_SHARING:
            np.matmul(left, right, out=tiled)
        else:
            shares = slices(tiles, threads.count)
            threads.each(lambda part: np.matmul(left, right[part], out=tiled[part]), shares)
        return out[:n, : self.out_features]


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
