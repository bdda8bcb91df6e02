"""The arithmetic under the sampler."""

from __future__ import annotations

import numpy as np
import pytest

from executor.sampling_ops import draw_filtered, log_softmax, philox, top_ids, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([v], np.uint64) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of Random123's kat_vectors.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox(words(*counter), words(*key))[:, 0].tolist() == list(expected)  # type: ignore[arg-type]


def test_uniforms_fill_the_interval_and_do_not_repeat() -> None:
    n = 100_000
    zeros = np.zeros(n, np.uint64)
    u = uniforms(zeros, np.arange(n), zeros)
    assert u.min() >= 0 and u.max() < 1
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 160
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.015
    others = (
        uniforms(zeros + np.uint64(1), np.arange(n), zeros),
        uniforms(zeros, np.arange(n), zeros + np.uint64(1)),
    )
    assert len(np.unique(np.concatenate([u, *others]))) == 3 * n


def test_log_softmax_of_large_logits() -> None:
    x = np.array([[1000.0, 999.0, -1e30]], np.float32)
    np.testing.assert_allclose(log_softmax(x)[0, :2], [-0.3132617, -1.3132617], rtol=1e-5)


def test_top_ids_are_in_order_and_break_ties_by_id() -> None:
    x = np.array([[1, 5, 5, 0, 5, 2], [7, 7, 7, 7, 7, 7], [0, 1, 2, 3, 4, 5]], np.float32)
    assert top_ids(x, 4).tolist() == [[1, 2, 4, 5], [0, 1, 2, 3], [5, 4, 3, 2]]
    assert top_ids(x, 2).tolist() == [[1, 2], [0, 1], [5, 4]]
    assert top_ids(x, 6)[0].tolist() == [1, 2, 4, 5, 0, 3]
    assert top_ids(x, 0).shape == (3, 0)
    signed = np.array([[-1.5, 0.0, -np.inf, -0.0, 2.5, -1e-30]], np.float32)
    assert top_ids(signed, 6).tolist() == [[4, 1, 3, 5, 0, 2]]


def test_a_nucleus_wider_than_the_candidates_is_drawn_from_the_whole_vocabulary() -> None:
    n, vocab = 2000, 6000
    logits = np.zeros((n, vocab), np.float32)
    logits[:, :10] = 3
    u = (np.arange(n) + 0.5) / n
    ones, none = np.ones(n, np.float32), np.zeros(n, np.float32)
    drawn = draw_filtered(logits, none, np.zeros(n, np.int32), ones * 0.9, u)
    weights = np.exp(logits[0].astype(float))
    kept = int(np.searchsorted(np.cumsum(weights), 0.9 * weights.sum())) + 1
    assert drawn.max() < kept and drawn.max() > kept * 0.98
    share = (drawn < 10).mean()
    assert abs(share - weights[:10].sum() / weights[:kept].sum()) < 0.002
