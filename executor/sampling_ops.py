"""The arithmetic of sampling: pure functions over a batch of logits.

None of them lets one line influence another, so that a request samples the same tokens whatever the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Tokens that are sorted for a top-p of usual width. A flatter distribution has its whole vocabulary sorted.
CANDIDATES = 1024
# Logits handled at once, so that the temporaries stay small (4 to 12 bytes a logit).
LOGITS_AT_ONCE = 1 << 20

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[UInt64s, UInt64s]) -> UInt64s:
    """Philox 4x32-10 (Salmon et al. 2011): 32-bit words in uint64 arrays (n,) -> four words, (4, n)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: UInt64s, positions: Int64s, streams: UInt64s) -> Float64s:
    """One number in [0, 1) for each (seed, position, stream), the same ever after. All (n,)."""
    at = positions.astype(np.uint64)
    words = philox((at & _LOW, at >> _32, streams, np.zeros_like(at)), (seeds & _LOW, seeds >> _32))
    bits = (words[0] << _32 | words[1]) >> np.uint64(11)
    numbers: Float64s = bits.astype(np.float64) * 2.0**-53
    return numbers


def log_softmax(logits: Float32s) -> Float32s:
    """(n, vocab) -> natural log-probs (n, vocab); sums in float64."""
    logprobs: Float32s = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(logprobs).sum(axis=1, keepdims=True, dtype=np.float64)
    logprobs -= np.log(total).astype(np.float32)
    return logprobs


def top_ids(values: Float32s, k: int) -> Int32s:
    """Ids of each line's k largest, largest first, the lower id first among equals. (n, vocab) -> (n, k)"""
    if k == 0:
        return np.empty((len(values), 0), np.int32)
    ids, _ = _largest(values, k)
    return ids[:, :k].astype(np.int32)


def _largest(values: Float32s, k: int) -> tuple[Int64s, Float32s]:
    """The k largest of each line and all that equal the k-th, in the order of `top_ids`: ids and values.

    Both (n, w), w >= k; lines with fewer are filled up with -inf and some id of the vocabulary.
    """
    n, vocab = values.shape
    if k >= vocab:
        ids = _descending(values)
        return ids, np.take_along_axis(values, ids, axis=1)
    threshold = np.partition(values, vocab - k, axis=1)[:, vocab - k, None]
    rows, found = np.nonzero(values >= threshold)
    counts = np.bincount(rows, minlength=n)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.zeros((n, int(counts.max(initial=k))), np.int64)
    largest = np.full(ids.shape, -np.inf, np.float32)
    ids[rows, column] = found
    largest[rows, column] = values[rows, found]
    order = _descending(largest)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(largest, order, axis=1)


def _descending(values: Float32s) -> Int64s:
    """The columns of each line by descending value, equals by ascending column. (n, w) -> (n, w)

    Sorts (value, column) packed in one integer: several times faster than a stable argsort.
    """
    bits = (values + np.float32(0)).view(np.int32)  # + 0 makes -0.0 equal to 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats in the order of integers
    keys = ~ascending.astype(np.int64) << 32
    keys |= np.arange(values.shape[1])
    keys.sort(axis=1)
    columns: Int64s = keys & 0xFFFFFFFF
    return columns


def penalise(
    logits: Float32s,
    rows: Int64s,
    token_ids: Int32s,
    output_counts: Int32s,
    repetition: Float32s,
    frequency: Float32s,
    presence: Float32s,
) -> None:
    """Lower the logits of seen tokens in place, in vLLM's order: repetition, frequency, presence.

    All (m,): `rows` and `token_ids` pair lines of `logits` with tokens of their prompt and output,
    `output_counts` tells how often the token is in the output, and the penalties are the line's. A pair may
    come more than once.
    """
    seen = logits[rows, token_ids]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= frequency * output_counts.astype(np.float32)
    seen -= presence * (output_counts > 0)
    logits[rows, token_ids] = seen


def draw(logits: Float32s, min_p: Float32s, uniform: Float64s) -> Int64s:
    """Sample each line from its softmax, without tokens less likely than `min_p` times the likeliest.

    `logits` (n, vocab) are divided by the temperature already; `min_p` (n,), 0 for none; `uniform` (n,) in
    [0, 1).
    """
    n, vocab = logits.shape
    drawn = np.empty(n, np.int64)
    at_once = max(1, LOGITS_AT_ONCE // vocab)
    for start in range(0, n, at_once):
        part = slice(start, start + at_once)
        weights = _weights(logits[part], min_p[part])
        drawn[part] = _pick(weights, uniform[part])
    return drawn


def draw_filtered(
    logits: Float32s, min_p: Float32s, top_k: Int32s, top_p: Float32s, uniform: Float64s
) -> Int64s:
    """As `draw`, from the `top_k` most likely (0: all; equals of the k-th stay), and of these from the fewest
    whose probability reaches `top_p` (1: all). All (n,).
    """
    vocab = logits.shape[1]
    drawn = np.full(len(logits), -1, np.int64)
    limit = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    narrow = (limit <= CANDIDATES) | (top_p < 1)
    k = np.where(limit <= CANDIDATES, limit, CANDIDATES)
    at_once = max(1, LOGITS_AT_ONCE // vocab)
    for wide in (False, True):
        # Second time round: lines whose nucleus was larger than the candidates.
        lines = np.flatnonzero(drawn < 0 if wide else narrow)
        for start in range(0, len(lines), at_once):
            part = lines[start : start + at_once]
            width = vocab if wide else int(k[part].max())
            drawn[part] = _draw_from_largest(
                logits[part], min_p[part], limit[part], top_p[part], uniform[part], width
            )
    return drawn


def _draw_from_largest(
    logits: Float32s, min_p: Float32s, limit: Int64s, top_p: Float32s, uniform: Float64s, width: int
) -> Int64s:
    """As `draw_filtered` among the `width` largest of each line; -1 where that is not enough to tell."""
    vocab = logits.shape[1]
    ids, values = _largest(logits, width)
    by_rank = np.minimum(limit, values.shape[1]) - 1
    least = np.take_along_axis(values, by_rank[:, None], axis=1)
    with np.errstate(invalid="ignore"):  # -inf from -inf, in lines without a possible token
        weights = np.exp((values - values[:, :1]).astype(np.float64))
    weights[(values < least) | (weights < min_p[:, None])] = 0
    upto = np.cumsum(weights, axis=1)
    total = upto[:, -1].copy()
    all_tokens = limit == vocab
    if width < vocab and all_tokens.any():
        total[all_tokens] = _weights(logits[all_tokens], min_p[all_tokens]).sum(axis=1, dtype=np.float64)
    goal = top_p * total
    kept = np.where(upto - weights < goal[:, None], weights, 0)
    drawn = np.take_along_axis(ids, _pick(kept, uniform)[:, None], axis=1)[:, 0]
    if width < vocab:
        drawn[all_tokens & (upto[:, -1] < goal)] = -1
    return drawn


def _weights(logits: Float32s, min_p: Float32s) -> Float32s:
    """exp(logit - the line's largest), 0 below `min_p`."""
    with np.errstate(invalid="ignore"):  # as above
        weights: Float32s = np.exp(logits - logits.max(axis=1, keepdims=True))
    if min_p.any():
        weights[weights < min_p[:, None]] = 0
    return weights


def _pick(weights: Float32s | Float64s, uniform: Float64s) -> Int64s:
    """The column where the running sum of each line's weights passes `uniform` of its total.

    A column of weight 0 is never picked; without any weight, the first is.
    """
    upto = np.cumsum(weights, axis=1, dtype=np.float64)
    picked = (upto <= (uniform * upto[:, -1])[:, None]).sum(axis=1)
    # Rounding may lift uniform * total to the total itself: then the last column that counts.
    last = (upto < upto[:, -1:]).sum(axis=1)
    columns: Int64s = np.minimum(picked, last)
    return columns
