"""A request of a simulation, which knows its trace instead of its tokens."""

from __future__ import annotations

import numpy as np

from engine_core.kv_cache.hashing import BlockHasher, PrefixHash
from engine_core.lab.load import block_names
from engine_core.replay.traces import TraceRequest
from engine_core.request import Request
from executor.sampling_params import SamplingParams


class SimulatedRequest(Request):
    """Takes a few hundred bytes while it waits, whatever its prompt's length.

    Its prompt is one number repeated without memory, and its own, so that partial blocks of different
    requests differ. The names of full blocks come from the trace, when the scheduler first asks for them.
    """

    __slots__ = ("first_s", "last_s", "num_output_tokens", "source")

    def __init__(self, source: TraceRequest) -> None:
        super().__init__(
            str(source.row),
            np.broadcast_to(np.int32(source.row & 0x7FFFFFFF), source.input_length),
            # No stop tokens: the length of the trace decides.
            SamplingParams(max_tokens=source.output_length),
            arrival_time=source.arrival_s,
        )
        self.source = source
        self.num_output_tokens = 0
        self.first_s = 0.0  # when the first and the last token so far came
        self.last_s = 0.0

    def extend_hashes(self, hasher: BlockHasher) -> None:
        if not self.block_hashes:
            self.block_hashes = block_names(self.source, hasher.block_size)
        super().extend_hashes(hasher)  # of sampled tokens, after a preemption

    def _start_hash(self, hasher: BlockHasher) -> PrefixHash:
        """From the trace's name of the prompt: there are no tokens to go on from."""
        prefix = hasher.start(None, None)
        if self.block_hashes:
            prefix.update(self.block_hashes[-1])
        return prefix
