"""A worker that computes nothing: what a step costs without a model."""

from __future__ import annotations

import numpy as np

from executor.batch_state import BatchState
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.worker import ModelInfo, Worker


class NullWorker(Worker):
    """Samples token 7 for every row that samples."""

    def init_device(self) -> None:
        pass

    def load_model(self) -> ModelInfo:
        return ModelInfo(vocab_size=32000, max_model_len=32768)

    def kv_cache_capacity(self) -> int:
        return 1 << 20

    def initialize_cache(self, num_blocks: int) -> None:
        pass

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        tokens = np.full((len(step.slots), 1), 7, np.int32)
        return ModelRunnerOutput(step.step_id, tokens, batch.samples(step).astype(np.int32))
