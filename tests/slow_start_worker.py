"""A worker that takes its time to load."""

from __future__ import annotations

import time

from executor.mock_worker import MockWorker
from executor.worker import ModelInfo


class SlowStartWorker(MockWorker):
    def load_model(self) -> ModelInfo:
        time.sleep(60)
        return super().load_model()
