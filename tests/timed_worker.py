"""A mock worker that writes down when its steps begin and end."""

from __future__ import annotations

import os
import time

from executor.batch_state import BatchState
from executor.mock_worker import MockWorker
from executor.step import ModelRunnerOutput, SchedulerOutput

LOG = "ENGINE_CORE_TEST_STEP_LOG"  # environment variable with the file's name


class TimedWorker(MockWorker):
    """A line for each step: begin, end, and the time that the mock's options ask for. Monotonic seconds."""

    def init_device(self) -> None:
        self._log = open(os.environ[LOG], "w", buffering=1)  # noqa: SIM115

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        begun = time.monotonic()
        output = super().execute_model(step, batch)
        print(begun, time.monotonic(), self._duration_s(step), file=self._log)
        return output

    def shutdown(self) -> None:
        self._log.close()
