"""A mock worker whose ranks meet in every step, and one of which can be told to come late."""

from __future__ import annotations

import time

import numpy as np

from executor.batch_state import BatchState
from executor.mock_worker import MockWorker
from executor.step import ModelRunnerOutput, SchedulerOutput


class GatheringWorker(MockWorker):
    _delay_s = 0.0

    def come_late(self, rank: int, seconds: float) -> None:
        """To the next step."""
        if self.rank == rank:
            self._delay_s = seconds

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        delay_s, self._delay_s = self._delay_s, 0.0
        time.sleep(delay_s)
        assert self.collective is not None
        self.collective.all_reduce(np.ones(8, np.float32))
        return super().execute_model(step, batch)
