"""First half of a plan: tokens and blocks for the requests that run already.

Two ways to the same decisions. `grant_together` plans the whole batch with operations on columns; it gives
up, having changed nothing, when free blocks could run out, because then the order matters: requests must be
preempted. `grant_in_order` is vLLM 0.33's loop, request by request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, Status
from engine_core.scheduler.running import CAPACITY, NEVER, NEXT_NAME, Row, RunningBatch
from executor.step import EMPTY, Int32s


@dataclass(slots=True)
class StepRules:
    """What holds for one step. Not changed once made."""

    budget: int  # tokens
    long_prefill_limit: int  # tokens of one request; 0: none
    defer_prefills: bool  # requests whose known tokens are not all computed sit this step out
    max_model_len: int
    priority: bool  # the victim of a preemption is the worst by (priority, arrival); else the newest


@dataclass(slots=True)
class Grants:
    """Who runs in this step, of those that ran already. Rows as they are when all is granted."""

    rows: Int32s | None  # ascending; None: all rows
    counts: Int32s  # tokens of each, >= 1
    total: int  # tokens
    block_slots: list[int] = field(default_factory=list)  # new blocks, in order: slot and block id
    block_ids: list[int] = field(default_factory=list)
    preempted: bool = False
    prefills: bool = False  # one had known tokens left uncomputed by its last step


def name_blocks(batch: RunningBatch, kv: KVCacheManager, rows: list[int], num_tokens: list[int]) -> None:
    """Let others find the blocks that the first `num_tokens` tokens of each row fill."""
    requests = [batch.requests[row] for row in rows]
    kv.name_blocks(requests, num_tokens)
    batch.table[NEXT_NAME, rows] = [(request.num_named_blocks + 1) * kv.block_size for request in requests]


def next_name(request: Request, kv: KVCacheManager) -> int:
    """Known tokens at which the request's next block gets its name."""
    return NEVER if kv.hasher is None else (request.num_named_blocks + 1) * kv.block_size


def grant_together(batch: RunningBatch, kv: KVCacheManager, rules: StepRules) -> Grants | None:
    """Plan all rows at once; None, with nothing changed, if blocks might not suffice."""
    if not batch.requests:
        return Grants(None, EMPTY, 0)
    c = batch.columns()
    target = c.known + c.placeholders
    counts = target - c.computed
    ends = target >= c.limit  # the token in flight is the request's last: it needs no further step
    if np.count_nonzero(ends):
        counts[ends] = 0
    if rules.long_prefill_limit:
        np.minimum(counts, rules.long_prefill_limit, out=counts)
    if rules.defer_prefills:
        counts[c.chunk != 0] = 0
    total = int(counts.sum())
    if total > rules.budget:
        spent_before = np.cumsum(counts) - counts
        np.minimum(counts, np.maximum(rules.budget - spent_before, 0), out=counts)
        total = rules.budget
    after = c.computed + counts
    prefills = bool(np.count_nonzero(c.chunk)) and bool(c.chunk[counts > 0].any())

    block_slots: list[int] = []
    block_ids: list[int] = []
    (growing,) = (after > c.capacity).nonzero()
    if len(growing):
        needs = -(-(after[growing] - c.capacity[growing]) // batch.block_size)
        if int(needs.sum()) > kv.pool.num_free:
            return None
        requests = batch.requests
        for row, need in zip(growing.tolist(), needs.tolist(), strict=True):
            block_ids += kv.grow(requests[row], need)
        block_slots = np.repeat(c.slot[growing], needs).tolist()
        c.capacity[growing] += needs * np.int32(batch.block_size)
    if kv.hasher is not None:
        filled = np.minimum(after, c.known)
        (full,) = (filled >= c.next_name).nonzero()
        if len(full):
            name_blocks(batch, kv, full.tolist(), filled[full].tolist())

    if np.count_nonzero(counts) == len(counts):
        return Grants(None, counts, total, block_slots, block_ids, prefills=prefills)
    rows = counts.nonzero()[0].astype(np.int32)
    return Grants(rows, counts[rows], total, block_slots, block_ids, prefills=prefills)


def grant_in_order(
    batch: RunningBatch, kv: KVCacheManager, rules: StepRules, preempt: Callable[[int, Request], None]
) -> Grants:
    """Plan row by row. `preempt(row, winner)` makes a request leave the batch for another, and wait."""
    budget = rules.budget
    granted: dict[Request, int] = {}
    new_blocks: dict[Request, list[int]] = {}
    preempted = prefills = False
    row = 0
    while row < len(batch) and budget > 0:
        request = batch.requests[row]
        c = batch.row(row)
        count = _wanted(c, rules, budget)
        if count <= 0:
            row += 1
            continue
        need = max(0, -(-(c.computed + count - c.capacity) // batch.block_size))
        while need > kv.pool.num_free and request.status is Status.RUNNING:
            victim_row = _victim(batch, rules)
            victim = batch.requests[victim_row]
            if victim_row < row:
                row -= 1
            budget += granted.pop(victim, 0)
            new_blocks.pop(victim, None)
            preempt(victim_row, request)
            preempted = True
        if request.status is not Status.RUNNING:
            if rules.priority:
                continue  # it was the worst; those behind it are better, and may use what it freed
            break
        if need:
            new_blocks[request] = kv.grow(request, need)
            batch.table[CAPACITY, row] += need * batch.block_size
        granted[request] = count
        prefills |= bool(c.chunk)
        filled = min(c.computed + count, c.known)
        if filled >= c.next_name:
            name_blocks(batch, kv, [row], [filled])
        budget -= count
        row += 1

    rows = [row for row, request in enumerate(batch.requests) if request in granted]
    return Grants(
        np.array(rows, np.int32),
        np.array(list(granted.values()), np.int32),
        rules.budget - budget,
        [request.slot for request, blocks in new_blocks.items() for _ in blocks],
        [block for blocks in new_blocks.values() for block in blocks],
        preempted,
        prefills,
    )


def _wanted(c: Row, rules: StepRules, budget: int) -> int:
    """Tokens for a row, if blocks suffice."""
    if c.placeholders > 0 and c.computed + 2 - c.placeholders >= c.limit:
        return 0
    if rules.defer_prefills and c.chunk:
        return 0
    count = c.known + c.placeholders - c.computed
    if rules.long_prefill_limit:
        count = min(count, rules.long_prefill_limit)
    return min(count, budget, rules.max_model_len - c.computed - 1)


def _victim(batch: RunningBatch, rules: StepRules) -> int:
    if not rules.priority:
        return len(batch) - 1
    worst = max(batch.requests, key=lambda request: (request.priority, request.arrival_time))
    return batch.requests.index(worst)
