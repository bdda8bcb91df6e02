"""A mock worker with one weight, a number that is added to every token id it samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from executor.batch_state import BatchState
from executor.mock_model import mock_tokens
from executor.mock_worker import MockWorker
from executor.step import ModelRunnerOutput, SchedulerOutput


class WeightedWorker(MockWorker):
    weight = 0

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        output = super().execute_model(step, batch)
        tokens = (output.sampled_token_ids + self.weight) % self.options.vocab_size
        output.sampled_token_ids = tokens.astype(np.int32)
        return output

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """`tensors` has `weight`; or `value` is the weight. `fails` is the rank that raises half-way."""
        if update_info.get("fails") == self.rank:
            raise ValueError("these weights are no good")
        tensors = update_info.get("tensors", {})
        self.weight = int(tensors["weight"][0]) if tensors else int(update_info["value"])

    def get_weight(self) -> int:
        return self.weight

    def nap(self, seconds: float, rank: int) -> None:
        if self.rank == rank:
            time.sleep(seconds)


def weighted_tokens(prompt: Sequence[int], count: int, weight: int, vocab_size: int) -> list[int]:
    """What the worker says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        (token,) = mock_tokens(np.asarray(tokens, np.int32), 1, vocab_size)
        tokens.append((int(token) + weight) % vocab_size)
    return tokens[len(prompt) :]
