"""Planning the batch on columns decides like planning it request by request, whatever happens."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
import pytest

from engine_core.scheduler.scheduler import Scheduler
from executor.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from tests.scheduling import Workload, all_outputs, random_workload

STEPS = 10_000
VOCAB_SIZE = 40  # small, so that stop rules of all kinds meet
PARTS = 4


class Run:
    """One scheduler on a workload, a step at a time; a token depends on the request and its position only."""

    def __init__(self, work: Workload, by_columns: bool) -> None:
        self.work = work
        self.scheduler = Scheduler(work.config, work.num_blocks, work.max_model_len)
        self.scheduler.by_columns = by_columns
        self.in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.depth = 2 if work.config.async_scheduling else 1
        self.num_steps = 0

    @property
    def done(self) -> bool:
        return (
            self.num_steps > self.work.last_event and not self.in_flight and not self.scheduler.has_requests()
        )

    def step(self) -> list[object]:
        """All that can be seen of a step."""
        self.work.before_step(self.num_steps, self.scheduler)
        self.num_steps += 1
        seen: list[object] = []
        step = None
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            seen.append(visible(step))
            self.in_flight.append((step, self.answer(step)))
        while self.in_flight and (len(self.in_flight) >= self.depth or step is None or not len(step.slots)):
            outputs = self.scheduler.update_from_output(*self.in_flight.pop(0))
            events = {o.request_id: o.events for o in all_outputs(outputs).values()}
            for output in all_outputs(outputs).values():
                output.events = [e.type for e in events[output.request_id] or ()]  # type: ignore[misc]
            seen.append({id_: msgspec.structs.astuple(o) for id_, o in all_outputs(outputs).items()})
        seen.append([request.request_id for request in self.scheduler.batch.requests])
        seen.append([request.request_id for request in self.scheduler.waiting])
        seen.append(self.scheduler.kv.pool.num_free)
        assert self.scheduler.check() == []
        return seen

    def answer(self, step: SchedulerOutput) -> ModelRunnerOutput:
        batch = self.scheduler.batch
        record = batch.in_flight[-1]
        tokens, sampled = [], []
        for request, row in zip(record.requests, record.row_list().tolist(), strict=True):
            r = batch.row(row)
            seed = f"{request.request_id}/{r.known + max(0, r.placeholders - 1)}".encode()
            tokens.append([zlib.crc32(seed) % VOCAB_SIZE])
            sampled.append(0 if r.chunk else 1)
        return ModelRunnerOutput(
            step.step_id, np.array(tokens, np.int32).reshape(-1, 1), np.array(sampled, np.int32)
        )


def visible(message: SchedulerOutput | NewRequest) -> dict[str, object]:
    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, list):
            return [visible(item) for item in value]
        return value

    return {name: plain(getattr(message, name)) for name in message.__struct_fields__}


@pytest.mark.parametrize("part", range(PARTS))
def test_columns_decide_like_the_loop(part: int) -> None:
    """10,000 steps of random work over all parts; every message, output and account is compared."""
    steps, seed = 0, 1000 * part
    together = 0
    while steps < STEPS // PARTS:
        work = random_workload(seed, vocab_size=VOCAB_SIZE)
        ours, reference = Run(work, by_columns=True), Run(work, by_columns=False)
        while not ours.done:
            assert ours.step() == reference.step(), f"seed {seed}, step {ours.num_steps}"
            steps += 1
        assert reference.done
        seed += 1
        together += 1
    assert together > 3
