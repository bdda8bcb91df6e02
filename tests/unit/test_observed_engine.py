"""What an engine says about itself while random work is thrown at it: the truth, at every step."""

from __future__ import annotations

import msgspec
import pytest

from engine_core.kv_encoding import BatchEncoder
from engine_core.kv_events import KVEventBatch, KVEventRecorder, RawEvent
from engine_core.kv_index import KVCacheIndex
from tests.scheduling import CheckedCore, make_request, random_workload
from transport.state_page import StatePage


class SlowClock:
    """Two milliseconds pass between two looks."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.002
        return self._now

    time = monotonic


class FollowingIndex:
    """A publisher at whose other end an index follows."""

    def __init__(self, block_size: int) -> None:
        self.index = KVCacheIndex()
        self._encoder = BatchEncoder(block_size, 0)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def publish(self, ts: float, events: list[RawEvent]) -> None:
        self.index.apply(self._decode(self._encoder.encode(ts, events)))


@pytest.mark.parametrize("seed", range(12))
def test_events_page_and_metrics_agree_with_the_engine(seed: int) -> None:
    work = random_workload(seed, vocab_size=32_000)
    config = msgspec.structs.replace(
        work.config,
        num_gpu_blocks_override=work.num_blocks,
        worker_options={"mock_max_model_len": work.max_model_len},
    )
    following = FollowingIndex(config.block_size)
    events = KVEventRecorder(following)
    with StatePage.create(1) as page:
        checked = CheckedCore(
            config,
            check=False,
            row=page.engine,
            kv_events=events,
            collect_metrics=True,
        )
        core, scheduler = checked.core, checked.core.scheduler
        for step in range(20_000):
            for spec in work.arrivals.get(step, ()):
                checked.add(spec["request_id"], **spec["fields"])
            checked.abort(*work.aborts.get(step, ()))
            if step in work.operations:
                work.arrivals.pop(step, None)
                work.aborts.pop(step, None)
                work.before_step(step, scheduler)
            if core.has_work:
                checked.step()
                events.flush()  # what planning the next step did would be told with its outcome
                assert following.index.hashes == set(scheduler.kv.pool.names())
            elif step > work.last_event:
                break
        core.shutdown()

        assert core.report is not None and core.metrics is not None
        core.report.going_idle()
        core.metrics.fold_steps()
        row, count, metrics = page.snapshot()["engine"], scheduler.counters, core.metrics
        assert (row["running"], row["waiting"], row["deferred"], row["blocks_used"]) == (0, 0, 0, 0)
        assert row["requests_admitted"] == row["requests_finished"] == len(checked.requests)
        assert row["blocks_cached"] == len(following.index.hashes)
        delivered = sum(len(outcome.tokens) for outcome in checked.requests.values())
        assert row["generation_tokens"] == delivered
        assert sum(metrics.finished.values()) == len(checked.requests)
        first = sum(metrics.time_to_first_token_s.counts)
        assert first == sum(bool(outcome.tokens) for outcome in checked.requests.values())
        assert first + sum(metrics.inter_token_s.counts) == delivered
        assert sum(metrics.queue_s.counts) == sum(metrics.decode_s.counts) == first
        assert metrics.iteration_tokens.total == delivered + count.prompt_tokens - count.cached_tokens
        assert metrics.num_preemptions.total == count.preemptions
        assert metrics._times == {}
        assert not scheduler.adapters.waiting and not scheduler.adapters.running


def test_a_page_written_while_steps_are_in_flight_says_how_many() -> None:
    work = random_workload(0, is_async=True)
    config = msgspec.structs.replace(work.config, num_gpu_blocks_override=64, enable_lora=False)
    with StatePage.create(1) as page:
        checked = CheckedCore(config, check=False, row=page.engine, clock=SlowClock())
        checked.core.add_request(make_request("a", [1, 2, 3], checked.scheduler, max_tokens=8))
        for _ in range(3):
            checked.core.step_fn()
        engine = page.snapshot()["engine"]
        assert (engine["in_flight"], engine["running"]) == (2, 1)
        assert engine["step_id"] == checked.core.batch_queue[-1][0].step_id
        assert engine["last_progress_s"] > 0
        checked.core.shutdown()
