"""What waits for a slow client is merged, and nothing of it is lost."""

from __future__ import annotations

import numpy as np

from engine_core.backlog import Backlog
from engine_core.outputs import ClientOutputs
from engine_core.protocol import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    LogprobsLists,
    OutputError,
    PrefillStats,
    SchedulerStats,
)
from engine_core.request import Request
from executor.sampling_params import SamplingParams


def request(request_id: str) -> Request:
    return Request(request_id, np.array([1], np.int32), SamplingParams(max_tokens=5))


def plain(**tokens: int) -> ClientOutputs:
    return ClientOutputs([request(id_) for id_ in tokens], np.array(list(tokens.values()), np.int32))


def rare(*outputs: EngineCoreOutput) -> ClientOutputs:
    return ClientOutputs(outputs=list(outputs))


def merged(*parts: ClientOutputs) -> list[EngineCoreOutput]:
    backlog = Backlog()
    for part in parts:
        backlog.add(part)
    outputs, messages = backlog.take()
    assert messages == []
    return outputs.outputs


def test_tokens_of_a_request_are_joined_in_order() -> None:
    outputs = merged(
        rare(EngineCoreOutput("a", [5], prefill_stats=PrefillStats(3))),
        plain(a=6, b=1),
        plain(b=2, a=7),
        rare(EngineCoreOutput("b", [0], finish_reason=FinishReason.STOP, stop_reason=0)),
    )
    a, b = outputs
    assert (a.request_id, a.new_token_ids, a.finish_reason) == ("a", [5, 6, 7], None)
    assert a.prefill_stats == PrefillStats(3)
    assert (b.new_token_ids, b.finish_reason, b.stop_reason) == ([1, 2, 0], FinishReason.STOP, 0)


def test_log_probs_and_events_are_joined() -> None:
    def lists(token: int) -> LogprobsLists:
        return LogprobsLists(
            np.array([[token, 9]], np.int32), np.array([[-0.5, -1]], np.float32), np.array([1], np.int32)
        )

    queued, scheduled = EngineCoreEvent(EventType.QUEUED, 1.0), EngineCoreEvent(EventType.SCHEDULED, 2.0)
    (output,) = merged(
        rare(EngineCoreOutput("a", [5], new_logprobs=lists(5), events=[queued])),
        rare(EngineCoreOutput("a", [6], new_logprobs=lists(6), events=[scheduled])),
    )
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[5, 9], [6, 9]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [1, 1]
    assert output.events == [queued, scheduled]


def test_an_error_is_kept_with_the_tokens_before_it() -> None:
    error = OutputError("worker_error", "no")
    (output,) = merged(
        plain(a=1), rare(EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, error=error))
    )
    assert (output.new_token_ids, output.finish_reason, output.error) == ([1], FinishReason.ERROR, error)


def test_an_id_that_is_used_again_gives_two_outputs() -> None:
    end = EngineCoreOutput("a", [2], finish_reason=FinishReason.LENGTH)
    outputs = merged(plain(a=1), rare(end), plain(a=3), rare(end), plain(a=4))
    assert [output.request_id for output in outputs] == ["a"] * 3
    assert [output.new_token_ids for output in outputs] == [[1, 2], [3, 2], [4]]


def test_the_last_statistics_and_all_finished_ids_are_kept() -> None:
    backlog = Backlog()
    for i in range(3):
        backlog.add(ClientOutputs(finished_requests=[str(i)], scheduler_stats=SchedulerStats(i)))
    outputs, _ = backlog.take()
    assert outputs.finished_requests == ["0", "1", "2"]
    assert outputs.scheduler_stats == SchedulerStats(2)


def test_messages_follow_the_outputs_before_them() -> None:
    backlog = Backlog()
    backlog.add(plain(a=1))
    backlog.add_message([b"answer"])
    outputs, messages = backlog.take()
    assert [output.new_token_ids for output in outputs.outputs] == [[1]]
    assert messages == [[b"answer"]]


def test_size_follows_tokens_and_not_steps() -> None:
    backlog = Backlog()
    for _ in range(1000):
        backlog.add(plain(a=1, b=2))
    assert 2000 <= backlog.size < 2100
