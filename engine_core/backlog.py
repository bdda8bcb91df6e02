"""Outputs for a client that does not keep up: they are merged, by request, until it takes them.

A merged output holds all tokens that its request got meanwhile, so what waits for a slow client grows with
its tokens and not with the steps, and nothing of it is lost.
"""

from __future__ import annotations

import numpy as np

from engine_core.outputs import ClientOutputs
from engine_core.protocol import EngineCoreOutput, LogprobsLists, SchedulerStats
from engine_core.wire import Frame

_OUTPUT_SIZE = 16  # what an output weighs beside its tokens

# What an output has at most once, or of which the last one counts.
_RARE = tuple(
    name
    for name in EngineCoreOutput.__struct_fields__
    if name not in ("request_id", "new_token_ids", "new_logprobs", "events", "num_nans_in_logits")
)


class _Merged:
    __slots__ = ("logprobs", "output", "tokens")

    def __init__(self, request_id: str) -> None:
        self.tokens = bytearray()  # int32
        self.logprobs: list[LogprobsLists] = []
        self.output = EngineCoreOutput(request_id, [])


class Backlog:
    """One client's. `size` is about the number of tokens that wait, log-probs counted like tokens."""

    def __init__(self) -> None:
        self.size = 0
        self._merged: dict[str, _Merged] = {}
        self._finished: list[str] = []
        self._stats: SchedulerStats | None = None
        self._messages: list[list[Frame]] = []

    def add(self, outputs: ClientOutputs) -> None:
        """What a step has for the client. Of statistics, the last are kept."""
        for request, token in zip(outputs.requests, outputs.token_ids, strict=True):
            self._of(request.request_id).tokens += token.tobytes()
        self.size += len(outputs.requests)
        for output in outputs.outputs:
            self._merge(output)
        if outputs.finished_requests:
            self._finished += outputs.finished_requests
        if outputs.scheduler_stats is not None:
            self._stats = outputs.scheduler_stats

    def add_message(self, frames: list[Frame]) -> None:
        """An encoded message, to be sent after all outputs before it."""
        self._messages.append(frames)
        self.size += _OUTPUT_SIZE + sum(map(len, frames)) // 4

    def take(self) -> tuple[ClientOutputs, list[list[Frame]]]:
        """All that waits: what to encode, and the messages to send behind it. For once."""
        outputs = ClientOutputs(
            outputs=[_finish(merged) for merged in self._merged.values()],
            finished_requests=self._finished or None,
            scheduler_stats=self._stats,
        )
        return outputs, self._messages

    def _of(self, request_id: str) -> _Merged:
        merged = self._merged.get(request_id)
        if merged is None or merged.output.finish_reason is not None:
            # The id of a request that has ended may be in use again: its outputs must not meet.
            if merged is not None:
                self._merged[f"{request_id}\0{len(self._merged)}"] = merged
                del self._merged[request_id]
            merged = self._merged[request_id] = _Merged(request_id)
            self.size += _OUTPUT_SIZE
        return merged

    def _merge(self, output: EngineCoreOutput) -> None:
        merged = self._of(output.request_id)
        merged.tokens += np.array(output.new_token_ids, np.int32).tobytes()
        self.size += len(output.new_token_ids)
        if output.new_logprobs is not None:
            merged.logprobs.append(output.new_logprobs)
            self.size += output.new_logprobs.logprob_token_ids.size * 2
        if output.new_prompt_logprobs_tensors is not None:
            self.size += output.new_prompt_logprobs_tensors.logprobs.array.size * 2
        into = merged.output
        for name in _RARE:
            value = getattr(output, name)
            if value is not None:
                setattr(into, name, value)
        into.num_nans_in_logits += output.num_nans_in_logits
        if output.events:
            into.events = [*(into.events or []), *output.events]


def _finish(merged: _Merged) -> EngineCoreOutput:
    output = merged.output
    output.new_token_ids = np.frombuffer(merged.tokens, np.int32).tolist()
    if merged.logprobs:
        output.new_logprobs = LogprobsLists(
            np.concatenate([part.logprob_token_ids for part in merged.logprobs]),
            np.concatenate([part.logprobs for part in merged.logprobs]),
            np.concatenate([part.sampled_token_ranks for part in merged.logprobs]),
        )
    return output
