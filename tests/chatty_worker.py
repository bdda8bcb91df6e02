"""A mock worker with a lot to say on stderr."""

from __future__ import annotations

import os

from executor.batch_state import BatchState
from executor.mock_worker import MockWorker
from executor.step import ModelRunnerOutput, SchedulerOutput


class ChattyWorker(MockWorker):
    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        os.write(2, b"x" * 999 + b"\n")
        return super().execute_model(step, batch)
