"""The smallest worker: a bigram model, whose next token depends on the last one alone.

    engine-core serve --worker-cls examples.minimal_worker:MinimalWorker --tensor-parallel-size 2

With several ranks each computes all of it. A real model would be shared out among them, and their partial
results put together by `self.collective`.
"""

from __future__ import annotations

import numpy as np

from executor.batch_state import BatchState
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.worker import ModelInfo, Worker

VOCAB_SIZE = 512


class MinimalWorker(Worker):
    def init_device(self) -> None:
        """Nothing to claim: numpy runs on the CPU."""

    def load_model(self) -> ModelInfo:
        self.logits = np.random.default_rng(self.config.seed).standard_normal((VOCAB_SIZE, VOCAB_SIZE))
        return ModelInfo(vocab_size=VOCAB_SIZE, max_model_len=4096)

    def kv_cache_capacity(self) -> int:
        return 4096

    def initialize_cache(self, num_blocks: int) -> None:
        # A bigram looks back at nothing. A transformer would allocate its keys and values here:
        # num_blocks * config.block_size positions for each layer.
        self.num_blocks = num_blocks

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        # The tokens of all rows, end to end; of them a bigram needs the last of each row. A transformer takes
        # batch.positions(step), batch.slot_mapping(step) (where the KV goes) and batch.block_table beside.
        input_ids = batch.input_ids(step)
        last = batch.query_start_loc(step)[1:] - 1
        tokens = self.logits[input_ids[last]].argmax(axis=1).astype(np.int32)
        # Rows in the middle of their prompt sample nothing; what is in their place is not looked at.
        return ModelRunnerOutput(step.step_id, tokens[:, None], batch.samples(step).astype(np.int32))
