"""Ranks as threads of one process: what the calls compute, and how they refuse."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.collective import Collective, CollectiveSegment
from transport.errors import CallMismatch, Cancelled, TransportError, TransportTimeout


@contextmanager
def ranks(world_size: int, chunk_bytes: int = 128, timeout_s: float = 20.0) -> Iterator[list[Collective]]:
    segment = CollectiveSegment(world_size, chunk_bytes)
    ends = [
        Collective([os.dup(fd) for fd in segment.fds], rank, timeout_s=timeout_s)
        for rank in range(world_size)
    ]
    segment.close()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def on_all(ends: list[Collective], call: Callable[[Collective], Any]) -> list[Any]:
    """What `call` returned or raised on each rank."""
    results: list[Any] = [None] * len(ends)

    def run(index: int, end: Collective) -> None:
        try:
            results[index] = call(end)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.int8])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.lists(st.tuples(shapes, dtypes, st.booleans()), min_size=1, max_size=4), st.data()
)
def test_any_sequence_of_calls_gives_what_numpy_gives(
    world_size: int, calls: list[tuple[tuple[int, ...], Any, bool]], data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    inputs = [
        [rng.integers(-9, 9, shape).astype(dtype) for shape, dtype, _ in calls] for _ in range(world_size)
    ]

    def run(end: Collective) -> list[np.ndarray]:
        found = []
        for array, (_, _, reduce) in zip(inputs[end.rank], calls, strict=True):
            if reduce:
                found.append(array.copy())
                end.all_reduce(found[-1])
            else:
                found.append(end.all_gather(array))
        return found

    with ranks(world_size) as ends:
        results = on_all(ends, run)
    for i, (_, dtype, reduce) in enumerate(calls):
        arrays = [inputs[r][i] for r in range(world_size)]
        expected = np.sum(arrays, axis=0, dtype=dtype) if reduce else np.concatenate(arrays, axis=-1)
        for result in results:
            assert result[i].dtype == dtype
            np.testing.assert_array_equal(result[i], expected)


def test_empty_arrays_need_no_exchange() -> None:
    with ranks(2) as ends:
        assert ends[0].all_gather(np.ones((0, 5))).shape == (0, 10)
        assert ends[0].all_gather(np.ones((5, 0))).shape == (5, 0)
        ends[0].all_reduce(np.ones(0))


def test_all_ranks_get_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(3, 1000)).astype(np.float32)

    def run(end: Collective) -> bytes:
        mine = arrays[end.rank].copy()
        end.all_reduce(mine)
        return mine.tobytes()

    with ranks(3) as ends:
        assert len(set(on_all(ends, run))) == 1


def test_a_strided_array_can_be_gathered_but_not_reduced() -> None:
    with ranks(2) as ends:
        array = np.arange(24.0).reshape(4, 6)[:, ::2]
        for result in on_all(ends, lambda end: end.all_gather(array)):
            np.testing.assert_array_equal(result, np.concatenate([array, array], axis=1))
        with pytest.raises(ValueError, match="C-contiguous"):
            ends[0].all_reduce(array)


def test_a_missing_rank_is_named_when_the_deadline_passes() -> None:
    with ranks(3, timeout_s=0.2) as ends:
        on_all(ends, lambda end: end.all_reduce(np.ones(4)))
        results = on_all(ends[:1] + ends[2:], lambda end: end.all_reduce(np.ones(4)))
        error = results[0]
        assert isinstance(error, TransportTimeout) and error.missing_ranks == (1,)
        assert f"rank 1 (pid {os.getpid()})" in str(error)
        with pytest.raises(TransportTimeout):  # the ranks no longer agree: no call can follow
            ends[0].all_reduce(np.ones(4))


def test_a_rank_that_never_attached_is_named() -> None:
    segment = CollectiveSegment(2)
    end = Collective(segment.fds, 0, timeout_s=0.05)
    with pytest.raises(TransportTimeout, match=r"rank 1 \(pid unknown\) .* did not attach") as caught:
        end.all_gather(np.ones(3))
    assert caught.value.missing_ranks == (1,)
    end.close()


@pytest.mark.parametrize("other", [np.ones(5), np.ones(4, np.int64), "gather"])
def test_different_calls_are_noticed(other: Any) -> None:
    def run(end: Collective) -> Any:
        if end.rank == 0:
            return end.all_reduce(np.ones(4))
        return end.all_gather(np.ones(4)) if isinstance(other, str) else end.all_reduce(other.copy())

    with ranks(2) as ends:
        for error in on_all(ends, run):
            assert isinstance(error, CallMismatch) and error.sequence == 1


def test_cancel_ends_a_wait() -> None:
    with ranks(2) as ends:
        timer = threading.Timer(0.05, ends[0].cancel)
        timer.start()
        with pytest.raises(Cancelled):
            ends[0].all_reduce(np.ones(4))
        timer.join()


def test_sizes_and_descriptors_are_checked() -> None:
    with pytest.raises(ValueError, match="1 to 64 ranks"):
        CollectiveSegment(0)
    with pytest.raises(ValueError, match="multiple of 64"):
        CollectiveSegment(2, 100)
    segment = CollectiveSegment(2)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        Collective(segment.fds, 2, timeout_s=1)
    with pytest.raises(TransportError, match="not a collective segment"):
        Collective(segment.fds[:2], 0, timeout_s=1)
    segment.close()
    segment.close()


def test_closing_gives_all_descriptors_back() -> None:
    gc.collect()  # maps that an earlier test's tracebacks kept
    before = len(os.listdir("/proc/self/fd"))
    with ranks(3) as ends:
        on_all(ends, lambda end: end.all_reduce(np.ones(4)))
    ends[0].close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(TransportError, match="closed"):
        ends[0].all_reduce(np.ones(4))
