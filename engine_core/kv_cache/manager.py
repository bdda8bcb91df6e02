"""Gives requests the KV blocks they need, and finds blocks that hold their prefix already."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.counters import Counters
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.hashing import BlockHasher
from engine_core.kv_events import KVEventRecorder
from engine_core.protocol import PrefixCacheStats
from engine_core.request import Request


class KVCacheManager:
    """The block tables of all live requests (`Request.block_ids`) over one `BlockPool`.

    The rules are those of vLLM 0.33's KV cache manager for one group of full-attention layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher | None,
        watermark: float = 0.0,
        *,
        counters: Counters | None = None,
        events: KVEventRecorder | None = None,
    ) -> None:
        """`hasher` None switches prefix caching off. `watermark` is a share of `num_blocks`."""
        self.pool = BlockPool(num_blocks)
        self.pool.events = events
        self.counters = Counters() if counters is None else counters
        self.block_size = block_size
        self.hasher = hasher
        self.watermark_blocks = int(watermark * num_blocks)
        self.max_tokens = (num_blocks - 1) * block_size  # what one request can hold at most
        self.prefix_stats = PrefixCacheStats()

    def find_prefix(self, request: Request, num_known: int) -> list[int]:
        """Blocks that hold the start of the request's `num_known` tokens.

        Never all of them: the last token is computed again, because its logits are needed.
        """
        if self.hasher is None:
            return []
        request.extend_hashes(self.hasher)  # of tokens that came while it was preempted
        if request.skip_reading_prefix_cache:
            return []
        return self.pool.find(request.block_hashes, (num_known - 1) // self.block_size)

    def admit(
        self,
        request: Request,
        hits: list[int],
        num_tokens: int,
        num_known: int,
        reserve_all: bool,
        keep_watermark: bool,
    ) -> bool:
        """Give a waiting request the blocks of its prefix and those for its first `num_tokens` tokens.

        False, and nothing is changed, if they are not to be had: with `reserve_all`, room for all `num_known`
        tokens must be free now; with `keep_watermark`, the watermark must stay free.
        """
        pool, block_size = self.pool, self.block_size
        held_back = pool.num_unheld(hits) + (self.watermark_blocks if keep_watermark else 0)
        needed = -(-num_tokens // block_size) - len(hits)
        gate = -(-num_known // block_size) - len(hits) if reserve_all else needed
        if gate + held_back > pool.num_free:
            return False
        pool.hold(hits)
        request.block_ids = hits + pool.allocate(needed, request.request_id)
        request.num_named_blocks = len(hits)
        return True

    def grow(self, request: Request, count: int) -> list[int]:
        """`count` more blocks for a request; the caller has checked that they are free."""
        blocks = self.pool.allocate(count, request.request_id)
        request.block_ids += blocks
        return blocks

    def record_lookup(self, request: Request, num_known: int, num_hit_blocks: int) -> None:
        """Count an admission's prefix look-up."""
        if self.hasher is None or request.skip_reading_prefix_cache:
            return
        stats, hits = self.prefix_stats, num_hit_blocks * self.block_size
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += num_known
            stats.preempted_hits += hits
        else:
            stats.requests += 1
            stats.queries += num_known
            stats.hits += hits
            counters = self.counters
            counters.prefix_requests += 1
            counters.prefix_queries += num_known
            counters.prefix_hits += hits

    def take_prefix_stats(self) -> PrefixCacheStats:
        """Counts since the last call."""
        stats, self.prefix_stats = self.prefix_stats, PrefixCacheStats()
        return stats

    def name_blocks(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        """Let others find the blocks that the first `num_tokens` tokens of each request fill.

        The blocks' hashes are known.
        """
        if self.hasher is None:
            return
        size, events = self.block_size, self.pool.events
        blocks: list[int] = []
        names: list[bytes] = []
        parts: list[tuple[Request, int, int]] = []
        for request, count in zip(requests, num_tokens, strict=True):
            first, last = request.num_named_blocks, count // size
            if first >= last:
                continue
            request.num_named_blocks = last
            blocks += request.block_ids[first:last]
            names += request.block_hashes[first:last]
            parts.append((request, first, last))
        if events is not None:
            self._announce(events, parts, names)
        self.pool.name(blocks, names)

    def _announce(
        self, events: KVEventRecorder, parts: list[tuple[Request, int, int]], names: list[bytes]
    ) -> None:
        """Blocks `first` to `last - 1` of each request are about to get these names: tell of each run of
        contents that are new.
        """
        if not self.pool.has_any(names) and len(set(names)) == len(names):
            for part in parts:
                events.stored(*part)
            return
        known: set[bytes] = set()  # by this very call
        for request, first, last in parts:
            start = first
            for index in range(first, last):
                name = request.block_hashes[index]
                if name in known or self.pool.has_any((name,)):
                    if start < index:
                        events.stored(request, start, index)
                    start = index + 1
                known.add(name)
            if start < last:
                events.stored(request, start, last)

    def unname_blocks(self, request: Request, num_tokens: int) -> None:
        """Take back the names of blocks beyond the first `num_tokens` tokens: they will not be computed."""
        last = num_tokens // self.block_size
        if last < request.num_named_blocks:
            self.pool.unname(request.block_ids[last : request.num_named_blocks])
            request.num_named_blocks = last

    def free(self, request: Request) -> None:
        """Take back all blocks of a request."""
        self.pool.release(request.block_ids, request.num_named_blocks)
        request.block_ids = []
        request.num_named_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content. False, and nothing is done, while any request holds a block."""
        if not self.pool.forget_all():
            return False
        self.prefix_stats.reset = True
        return True
