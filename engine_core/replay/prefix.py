"""What prefix caching can save at most on a trace: counted from its hash ids alone, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.replay.traces import HASH_BLOCK_TOKENS, TraceRequest


def unbounded_prefix_hits(requests: Sequence[TraceRequest], block_size: int) -> list[int]:
    """Prompt tokens that each request finds cached, if nothing is ever evicted and prompts are served in
    order.

    Whole blocks of `block_size` tokens count, and the last token of a prompt is always computed. Requests
    without hash ids share nothing. `block_size` must divide 512, so that blocks do not straddle hash ids.
    """
    if HASH_BLOCK_TOKENS % block_size:
        raise ValueError(f"block_size {block_size} does not divide {HASH_BLOCK_TOKENS}")
    # A tree of prefixes: (parent node, hash id) -> its node and how many of its 512 tokens were in some
    # prompt.
    nodes: dict[tuple[int, int], int] = {}
    extents: list[int] = [0]
    hits = []
    for request in requests:
        cached = 0
        unbroken = True
        node = 0
        for index, hash_id in enumerate(request.hash_ids or ()):
            extent = min(HASH_BLOCK_TOKENS, request.input_length - index * HASH_BLOCK_TOKENS)
            child = nodes.setdefault((node, hash_id), len(extents))
            if child == len(extents):
                extents.append(0)
            if unbroken:
                cached += min(extent, extents[child])
                unbroken = extents[child] >= HASH_BLOCK_TOKENS
            extents[child] = max(extents[child], extent)
            node = child
        hits.append(min(cached, request.input_length - 1) // block_size * block_size)
    return hits
