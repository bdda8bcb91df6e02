"""Attention over the paged KV cache.

The cache of one layer is (num_blocks, block_size, 2, kv_heads, head_dim): the keys and values of `block_size`
consecutive tokens of one sequence lie together, wherever the scheduler put the block. A step's attention is
cut into jobs. A job is either several sequences that decode one token each, or up to `QUERY_TILE` tokens of
one prompt chunk; it copies the blocks it needs side by side, which stays in the processor's cache, and
multiplies.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.batch_state import BatchState
from executor.step import SchedulerOutput

Float32s = npt.NDArray[np.float32]

QUERY_TILE = 128
# Tokens of context that a decode job gathers at most. More sequences a job mean fewer calls; but the copy
# (1.5 KiB a token for SmolLM2) should not outgrow the processor's caches.
GATHER_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class AttentionJob:
    """`queries` consecutive tokens of each of b sequences, and the blocks they look at."""

    rows: slice | npt.NDArray[np.intp]  # of the step's flat tokens; b * queries of them
    queries: int
    blocks: npt.NDArray[np.int32]  # (b, blocks) block ids, padded with block 0
    mask: Float32s | None  # added to the scores of the last positions: 0, or -inf for what is not to be seen


def plan_attention(step: SchedulerOutput, batch: BatchState) -> list[AttentionJob]:
    """The jobs of `step`, the largest first."""
    starts = batch.query_start_loc(step)
    lengths = step.num_computed_tokens + step.num_scheduled_tokens
    jobs: list[AttentionJob] = []
    for row in np.flatnonzero(step.num_scheduled_tokens > 1).tolist():
        table = batch.block_table[step.slots[row]]
        first, computed = int(starts[row]), int(step.num_computed_tokens[row])
        for done in range(0, int(step.num_scheduled_tokens[row]), QUERY_TILE):
            queries = min(QUERY_TILE, int(step.num_scheduled_tokens[row]) - done)
            rows = slice(first + done, first + done + queries)
            jobs.append(_chunk_job(rows, computed + done, table, batch.block_size))
    decodes = np.flatnonzero(step.num_scheduled_tokens == 1)
    decodes = decodes[np.argsort(lengths[decodes], kind="stable")[::-1]]
    while len(decodes):
        longest = int(lengths[decodes[0]])
        group = decodes[: max(1, GATHER_TOKENS // longest)]
        decodes = decodes[len(group) :]
        tables = batch.block_table[step.slots[group], : -(-longest // batch.block_size)]
        jobs.append(_decode_job(starts[group].astype(np.intp), lengths[group], tables, batch.block_size))
    jobs.sort(key=lambda job: job.blocks.size * job.queries, reverse=True)
    return jobs


def _chunk_job(rows: slice, computed: int, table: npt.NDArray[np.int32], block_size: int) -> AttentionJob:
    queries = rows.stop - rows.start
    blocks = table[None, : -(-(computed + queries) // block_size)]
    # Every query sees one token more than the one before it; none sees the rest of the last block.
    width = blocks.shape[1] * block_size - computed
    mask = np.triu(np.full((queries, width), -np.inf, np.float32), 1)
    return AttentionJob(rows, queries, blocks, mask)


def _decode_job(
    rows: npt.NDArray[np.intp], lengths: npt.NDArray[np.int32], tables: npt.NDArray[np.int32], block_size: int
) -> AttentionJob:
    """`lengths` (b,) descending: the tokens each sequence sees."""
    shortest, end = int(lengths[-1]), tables.shape[1] * block_size
    mask = None
    if shortest < end:
        beyond = np.arange(shortest, end) >= lengths[:, None]
        mask = np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, None]
    return AttentionJob(rows, 1, tables, mask)


_scratch = threading.local()


def attend(job: AttentionJob, query: Float32s, cache: Float32s, out: Float32s) -> None:
    """Attention of one layer for one job.

    `query` (tokens, heads, head_dim), already scaled and rotated, and `out` of the same shape are the whole
    step's; `cache` is the layer's.
    """
    block_size, _, kv_heads, head_dim = cache.shape[1:]
    b, num_blocks = job.blocks.shape
    group = query.shape[1] // kv_heads  # query heads to a KV head
    gathered = _gather(job.blocks, cache)
    values = gathered[..., 1, :, :].reshape(b, -1, kv_heads, head_dim).transpose(0, 2, 1, 3)
    if job.queries == 1:
        # The heads that share keys are the rows of one small product a block.
        mine = query[job.rows].reshape(b, 1, kv_heads, group, head_dim)
        keys = gathered[..., 0, :, :].transpose(0, 1, 3, 4, 2)  # (b, blocks, kv_heads, head_dim, block_size)
        scores = np.empty((b, kv_heads, group, num_blocks * block_size), np.float32)
        by_block = scores.reshape(b, kv_heads, group, num_blocks, block_size).transpose(0, 3, 1, 2, 4)
        np.matmul(mine, keys, out=by_block)
    else:
        mine = query[job.rows].reshape(job.queries, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        keys = gathered[0, ..., 0, :, :].reshape(-1, kv_heads, head_dim).transpose(1, 2, 0)
        values = values[0, :, None]
        scores = np.matmul(mine, keys[:, None])  # (kv_heads, group, queries, context)
    if job.mask is not None:
        scores[..., -job.mask.shape[-1] :] += job.mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    result = np.matmul(scores, values)
    result /= total
    if job.queries == 1:
        out[job.rows] = result.reshape(b, -1, head_dim)
    else:
        out[job.rows] = result.transpose(2, 0, 1, 3).reshape(job.queries, -1, head_dim)


def _gather(blocks: npt.NDArray[np.int32], cache: Float32s) -> Float32s:
    """Copy blocks side by side: (b, blocks, block_size, 2, kv_heads, head_dim), good until the next call.

    Each thread keeps its copy's memory: fresh pages would cost more than the copying.
    """
    size = blocks.size * cache[0].size
    kept: Float32s | None = getattr(_scratch, "memory", None)
    if kept is None or kept.size < size:
        kept = _scratch.memory = np.empty(size, np.float32)
    gathered = kept[:size].reshape(*blocks.shape, *cache.shape[1:])
    return np.take(cache, blocks, axis=0, out=gathered, mode="clip")  # other modes go through a buffer
