from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from engine_core.errors import EngineDeadError, RequestError
from engine_core.protocol import EngineCoreEvent, EventType
from engine_core.replay.driver import Record, Replay
from engine_core.replay.report import Report, make_report, table
from engine_core.replay.traces import TraceRequest
from executor.mock_model import mock_tokens
from executor.sampling_params import SamplingParams

VOCAB = 500


@dataclass
class Delta:
    new_token_ids: list[int]
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    events: list[EngineCoreEvent] | None = None


@dataclass
class FakeEngine:
    """Answers two tokens at a time; what goes wrong is by prompt length."""

    refuse: int = 0
    shorten: int = 0
    lie: int = 0
    die: int = 0
    hang: int = 0
    running: int = 0
    most_running: int = 0
    prompts: list[int] = field(default_factory=list)
    aborted: int = 0

    async def generate(
        self, prompt_token_ids: npt.NDArray[np.int32], params: SamplingParams
    ) -> AsyncIterator[Delta]:
        assert params.max_tokens is not None and params.eos_token_id is None
        length = len(prompt_token_ids)
        self.prompts.append(length)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if length == self.refuse:
                raise RequestError("validation_error", "too long")
            if length == self.die:
                raise EngineDeadError("rank 1 was killed")
            tokens = mock_tokens(prompt_token_ids, params.max_tokens, VOCAB).tolist()
            if length == self.lie:
                tokens[-1] ^= 1
            if length == self.shorten:
                tokens = tokens[:1]
            for start in range(0, len(tokens), 2):
                await asyncio.sleep(0.01 if length != self.hang else 60)
                last = start + 2 >= len(tokens)
                kinds = [EventType.QUEUED, EventType.SCHEDULED] if start == 0 else [EventType.PREEMPTED]
                events = [EngineCoreEvent(kind, 0.0) for kind in kinds]
                cached = 16 if start == 0 else None
                yield Delta(tokens[start : start + 2], "length" if last else None, cached, events)
        except GeneratorExit:
            self.aborted += 1
            raise
        finally:
            self.running -= 1


def _requests(*lengths: int, spacing_s: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(row, row * spacing_s, length, 5) for row, length in enumerate(lengths)]


def _report(replay: Replay) -> Report:
    return make_report(
        replay.records,
        num_requests=len(replay.requests),
        wall_s=1.0,
        vocab_size=VOCAB,
        tokens_of=lambda prompt, n: mock_tokens(prompt, n, VOCAB),
        unbounded_hits=[0] * len(replay.requests),
        engine_steps=9,
    )


async def test_every_request_is_served_checked_and_counted() -> None:
    replay = Replay(FakeEngine(), _requests(30, 40, 50), vocab_size=VOCAB)
    await replay.run()
    report = _report(replay)
    assert report.ok and (report.requests, report.completed, report.failed, report.unfinished) == (3, 3, 0, 0)
    assert (report.prompt_tokens, report.output_tokens, report.mismatched_tokens) == (120, 15, 0)
    assert (report.prefix_hit_tokens, report.preemptions, report.failures) == (48, 6, {})
    assert report.ttft_ms.p50 is not None and report.e2e_ms.p50 is not None
    assert report.ttft_ms.p50 < report.e2e_ms.p50
    assert "mismatched tokens" in table(report) and "prompt tokens" in table(report)


async def test_requests_leave_in_order_at_their_times() -> None:
    replay = Replay(FakeEngine(), _requests(30, 40, 50, spacing_s=10.0), vocab_size=VOCAB, speed=200.0)
    await replay.run()
    sent = [record.sent_s - replay.started_s for record in replay.records]
    assert [record.request.row for record in replay.records] == [0, 1, 2]
    assert sent[1] >= 0.05 and sent[2] >= 0.1


async def test_concurrency_is_bounded_without_changing_the_order() -> None:
    engine = FakeEngine()
    replay = Replay(engine, _requests(*range(10, 20)), vocab_size=VOCAB, max_concurrency=3)
    await replay.run()
    assert engine.most_running == 3 and engine.prompts == list(range(10, 20))
    assert _report(replay).completed == 10


async def test_a_refused_and_a_shortened_request_fail_alone() -> None:
    replay = Replay(FakeEngine(refuse=40, shorten=50), _requests(30, 40, 50), vocab_size=VOCAB)
    await replay.run()
    report = _report(replay)
    assert not report.ok and (report.completed, report.failed, report.mismatched_tokens) == (1, 2, 0)
    assert report.failures == {"validation_error: too long": 1, "ended by length after 1 of 5 tokens": 1}
    assert "too long" in table(report)


async def test_a_wrong_token_is_counted() -> None:
    replay = Replay(FakeEngine(lie=40), _requests(30, 40), vocab_size=VOCAB)
    await replay.run()
    report = _report(replay)
    assert (report.completed, report.mismatched_tokens, report.ok) == (2, 1, False)


async def test_a_dead_engine_ends_the_replay_at_once_with_what_there_is() -> None:
    engine = FakeEngine(die=40, hang=50)
    replay = Replay(engine, _requests(30, 40, 50), vocab_size=VOCAB)
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        await replay.run()
    report = _report(replay)
    assert report.failed == 1 and report.unfinished == 2
    assert engine.running == 0


async def test_cancelling_aborts_what_runs_and_keeps_what_is_done() -> None:
    engine = FakeEngine(hang=50)
    replay = Replay(engine, _requests(30, 50, 60, spacing_s=1.0), vocab_size=VOCAB, speed=10.0)
    task = asyncio.ensure_future(replay.run())
    while replay.num_done < 1:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    report = _report(replay)
    assert (report.completed, report.failed) == (1, 0) and report.unfinished == 2
    assert engine.running == 0


def test_a_report_of_nothing_has_no_latencies() -> None:
    report = make_report(
        [],
        num_requests=4,
        wall_s=0.0,
        vocab_size=VOCAB,
        tokens_of=None,
        unbounded_hits=None,
        engine_steps=None,
    )
    assert report.unfinished == 4 and report.mismatched_tokens is None and report.ttft_ms.p99 is None
    assert "not known" in table(report)


def test_gaps_between_tokens_are_of_one_request_each() -> None:
    from array import array

    records = [
        Record(
            TraceRequest(0, 0.0, 1, 2),
            0.0,
            array("i", [1, 2]),
            array("d", [1.0, 1.5]),
            finish_reason="length",
        ),
        Record(
            TraceRequest(1, 0.0, 1, 2),
            0.0,
            array("i", [1, 2]),
            array("d", [9.0, 9.5]),
            finish_reason="length",
        ),
    ]
    report = make_report(
        records,
        num_requests=2,
        wall_s=2.0,
        vocab_size=VOCAB,
        tokens_of=None,
        unbounded_hits=None,
        engine_steps=0,
    )
    assert report.itl_ms.p99 == 500.0 and report.ttft_ms.p50 == 5000.0 and report.output_tokens_per_s == 2.0
