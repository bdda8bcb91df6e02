"""What a step yields for the clients: tokens as columns, everything rarer as an output of its own."""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress

import numpy as np
import numpy.typing as npt

from engine_core.outputs import ClientOutputs, StepOutputs
from engine_core.protocol import (
    EngineCoreOutput,
    LogprobsLists,
    LogprobsTensors,
    PrefillStats,
    SchedulerStats,
    Tensor,
)
from engine_core.request import Request
from executor.step import Int32s, Logprobs, PromptLogprobs


class OutputCollector:
    """Sorts a step's outputs by client."""

    def __init__(self) -> None:
        self.outputs: StepOutputs = {}

    def client(self, client_index: int) -> ClientOutputs:
        outputs = self.outputs.get(client_index)
        if outputs is None:
            outputs = self.outputs[client_index] = ClientOutputs()
        return outputs

    def add(self, request: Request, output: EngineCoreOutput) -> None:
        self.client(request.client_index).outputs.append(output)

    def add_plain(
        self, requests: list[Request], tokens: Int32s, clients: Int32s, client_indices: Collection[int]
    ) -> None:
        """One token for each request. `clients` (n,) are their clients, out of `client_indices`."""
        if len(client_indices) == 1:
            if requests:
                plain = self.client(requests[0].client_index)
                plain.requests, plain.token_ids = requests, tokens
            return
        for client_index in client_indices:
            mine = clients == client_index
            if np.count_nonzero(mine):
                plain = self.client(client_index)
                plain.requests = list(compress(requests, mine.tolist()))
                plain.token_ids = tokens[mine]

    def attach(self, stats: SchedulerStats | None, finished: dict[int, list[str]] | None) -> None:
        """Statistics go to one client only: the first that has something anyway."""
        for client_index, ids in (finished or {}).items():
            self.client(client_index).finished_requests = ids
        if stats is not None:
            first = next(iter(self.outputs), 0)
            self.client(first).scheduler_stats = stats


class SampledLogprobs:
    """Finds a row's lines in a step's log-probs."""

    def __init__(self, logprobs: Logprobs | None) -> None:
        self._logprobs = logprobs

    def of(self, line: int, request: Request) -> LogprobsLists | None:
        """For the token of the step's row `line`, with as many columns as the request asked for."""
        found, params = self._logprobs, request.params
        if found is None or params.logprobs is None:
            return None
        at = int(np.searchsorted(found.rows, line))
        if at == len(found.rows) or found.rows[at] != line:
            return None
        wanted = len(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs
        width = found.token_ids.shape[1] if wanted < 0 else 1 + wanted
        one = slice(at, at + 1)
        return LogprobsLists(
            found.token_ids[one, :width].copy(),
            found.logprobs[one, :width].copy(),
            found.ranks[one].copy(),
        )


def keep_prompt_logprobs(request: Request, part: PromptLogprobs) -> None:
    """File log-probs of a prompt chunk until the request's first output takes them along."""
    if request.prefilled:
        return  # computed again after a preemption
    copy = PromptLogprobs(part.row, part.token_ids.copy(), part.logprobs.copy(), part.ranks.copy())
    if request.prompt_logprobs is None:
        request.prompt_logprobs = [copy]
    else:
        request.prompt_logprobs.append(copy)


def take_prompt_logprobs(request: Request) -> LogprobsTensors | None:
    """All log-probs of the prompt, once."""
    parts, request.prompt_logprobs = request.prompt_logprobs, None
    if not parts or request.params.prompt_logprobs is None:
        return None
    wanted = request.params.prompt_logprobs

    def joined(arrays: list[npt.NDArray[np.generic]]) -> Tensor:
        return Tensor(np.concatenate(arrays))

    width = parts[0].token_ids.shape[1] if wanted < 0 else 1 + wanted
    return LogprobsTensors(
        joined([part.token_ids[:, :width] for part in parts]),
        joined([part.logprobs[:, :width] for part in parts]),
        joined([part.ranks for part in parts]),
    )


def make_output(
    request: Request, token: int, logprobs: LogprobsLists | None, stats: PrefillStats | None
) -> EngineCoreOutput:
    """Output with one token; the finish reason is the request's. `stats` comes with the first output."""
    return EngineCoreOutput(
        request.request_id,
        [token],
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=None if stats is None else take_prompt_logprobs(request),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        prefill_stats=stats,
    )
