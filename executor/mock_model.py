"""The mock's model: what it samples is a pure function of the tokens before.

The digest of a prefix is a linear congruential chain, `h(-1) = SEED` and `h(i) = (h(i-1) * A + token(i) + C)
mod 2^64`; the token sampled after position i is `(h(i) >> 33) % vocab_size`.

`A` is odd, so it has an inverse mod 2^64 and the chain has a closed form: over a chunk that follows digest
`h`, `h(j) = A^(j+1) * (h + sum over i <= j of (token(i) + C) * A^-(i+1))`. That makes many chunks at once a
few vector operations; uint64 wraps around by itself.

The distribution after a digest, of which only the most likely token is ever sampled: token `(t + d) %
vocab_size`, where t is the sampled one, has rank d + 1 and log-probability `-(d + 1) * ln 2`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

SEED = 0x9E3779B97F4A7C15
A = 6364136223846793005
C = 1442695040888963407
A_INVERSE = pow(A, -1, 1 << 64)
DEFAULT_VOCAB_SIZE = 32000
_MASK = (1 << 64) - 1


class _Powers:
    """`base ** (i + 1) mod 2^64` for i below what was asked for so far."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._known = np.array([base], np.uint64)

    def upto(self, count: int) -> UInt64s:
        while len(self._known) < count:  # doubling: base^(n+i) = base^n * base^i
            self._known = np.concatenate((self._known, self._known * self._known[-1]))
        return self._known[:count]


_powers = _Powers(A)
_inverse_powers = _Powers(A_INVERSE)


def chain(digests: UInt64s, token_ids: Int32s, counts: npt.NDArray[np.integer]) -> UInt64s:
    """The digest after each token of n chunks laid end to end.

    `digests` (n,) precede the chunks, `counts` (n,) >= 1 are their lengths, `token_ids` (sum of counts,).
    """
    terms = token_ids.astype(np.uint64)
    terms += np.uint64(C)
    if len(terms) == len(counts):
        terms += digests * np.uint64(A)
        return terms
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    within = np.arange(len(terms)) - np.repeat(starts, counts)
    longest = int(counts.max())
    terms *= _inverse_powers.upto(longest)[within]
    sums = np.cumsum(terms, dtype=np.uint64)
    before = np.where(starts > 0, sums[starts - 1], np.uint64(0))
    sums += np.repeat(digests - before, counts)
    sums *= _powers.upto(longest)[within]
    return sums


def sampled(digests: UInt64s, vocab_size: int) -> Int32s:
    """The token sampled after each digest."""
    tokens: Int32s = ((digests >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int32)
    return tokens


def mock_tokens(prompt: npt.ArrayLike, n: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Int32s:
    """The `n` tokens that a request with this prompt (>= 1 token) gets. int32 (n,)"""
    tokens = np.asarray(prompt, np.int32)
    if not len(tokens):
        raise ValueError("a prompt has at least one token")
    digest = int(chain(np.array([SEED], np.uint64), tokens, np.array([len(tokens)]))[-1])
    output = np.empty(n, np.int32)
    for i in range(n):
        token = (digest >> 33) % vocab_size
        output[i] = token
        digest = (digest * A + token + C) & _MASK
    return output


def prompt_digests(prompt: npt.ArrayLike) -> UInt64s:
    """The digest after each prompt token. (len(prompt),)"""
    tokens = np.asarray(prompt, np.int32)
    return chain(np.array([SEED], np.uint64), tokens, np.array([len(tokens)]))


def judge(
    digests: UInt64s, token_ids: Int32s, num_likeliest: int, vocab_size: int
) -> tuple[Int32s, Float32s, Int32s]:
    """Log-probs of `token_ids` (r,) as continuations of `digests` (r,), with the k most likely beside them.

    Returns token ids (r, 1 + k), log-probs (r, 1 + k) and ranks (r,), as `executor.step.Logprobs` holds them.
    """
    top = sampled(digests, vocab_size)
    distances = np.empty((len(top), 1 + num_likeliest), np.int32)
    distances[:, 0] = np.mod(token_ids - top, vocab_size)
    distances[:, 1:] = np.arange(num_likeliest, dtype=np.int32)
    ids = np.mod(top[:, None] + distances, vocab_size, dtype=np.int32)
    return ids, logprob_of(distances), distances[:, 0] + np.int32(1)


def judge_given(
    digests: UInt64s, token_ids: Int32s, given: npt.NDArray[np.int32], vocab_size: int
) -> tuple[Int32s, Float32s]:
    """Log-probs of `token_ids` (r,) and, beside each, of the tokens `given` (r, k). Returns (r, 1 + k)
    twice."""
    ids = np.concatenate((token_ids[:, None], given), axis=1)
    distances = np.mod(ids - sampled(digests, vocab_size)[:, None], vocab_size)
    return ids, logprob_of(distances)


def logprob_of(distances: Int32s) -> Float32s:
    """The log-probability of the token at these distances from the most likely one."""
    result: Float32s = ((distances + 1) * -math.log(2)).astype(np.float32)
    return result
