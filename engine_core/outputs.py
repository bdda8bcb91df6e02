"""What a step yields for the front ends, before it is encoded.

Most rows of a decode step carry one new token and nothing else. Those travel as columns, so
that no object is made per token; everything rarer (first and last outputs, log-probs, errors) is an
`EngineCoreOutput`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine_core.protocol import EngineCoreOutput, OutputError

if TYPE_CHECKING:
    from engine_core.protocol import SchedulerStats
    from engine_core.request import Request


@dataclass(slots=True)
class ClientOutputs:
    """All that one step has for one client."""

    # Rows with exactly one new token: requests[i] gets token_ids[i].
    requests: list[Request] = field(default_factory=list)
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    finished_requests: list[str] | None = None  # only under a data-parallel coordinator
    scheduler_stats: SchedulerStats | None = None


StepOutputs = dict[int, ClientOutputs]  # by client index


def merge(outputs: StepOutputs, client_index: int, more: ClientOutputs) -> None:
    """Add outputs without columns to those of the same client."""
    before = outputs.setdefault(client_index, more)
    if before is not more:
        before.outputs += more.outputs
        before.finished_requests = [*(before.finished_requests or ()), *(more.finished_requests or ())]


def finish_outputs(requests: Iterable[Request], error: OutputError | None = None) -> StepOutputs:
    """The last output of requests that were ended from outside; `error` says why they failed, if so."""
    outputs: StepOutputs = {}
    for request in requests:
        client = outputs.setdefault(request.client_index, ClientOutputs(finished_requests=[]))
        client.outputs.append(
            EngineCoreOutput(request.request_id, [], finish_reason=request.finish_reason, error=error)
        )
        assert client.finished_requests is not None
        client.finished_requests.append(request.request_id)
    return outputs
