"""The least that can drive an executor: gives out slots and blocks, builds steps, takes in tokens.

It decides nothing; a test says who enters, who runs for how many tokens and who leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor.mock_model import mock_tokens
from executor.sampling_params import SamplingParams
from executor.step import EMPTY, ModelRunnerOutput, NewRequest, SchedulerOutput

Execute = Callable[[SchedulerOutput], ModelRunnerOutput]


def int32s(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32) if values else EMPTY


@dataclass(eq=False)
class Row:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    slot: int = -1
    computed: int = 0
    tokens: list[int] = field(default_factory=list)  # prompt and output
    blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def assert_right(self, vocab_size: int = 32000) -> None:
        assert self.output == mock_tokens(self.prompt, len(self.output), vocab_size).tolist()


class BatchDriver:
    def __init__(self, num_blocks: int = 512, block_size: int = 16, max_num_seqs: int = 256) -> None:
        self.block_size = block_size
        self.free_slots = list(range(max_num_seqs))
        self.free_blocks = list(range(1, num_blocks))
        self.rows: list[Row] = []
        self._new: list[Row] = []
        self._finished: list[int] = []
        self._preempted: list[int] = []
        self._step_id = 0

    def add(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        shares: Row | None = None,
        hit_blocks: int = 0,
    ) -> Row:
        """A request enters; with the first `hit_blocks` of `shares`'s blocks as its prefix hit."""
        row = Row(
            f"r{self._step_id}.{len(self.rows)}", prompt, params or SamplingParams(), tokens=list(prompt)
        )
        if shares is not None:
            row.blocks = shares.blocks[:hit_blocks]
            row.computed = hit_blocks * self.block_size
        self.enter(row)
        return row

    def enter(self, row: Row) -> None:
        row.slot = self.free_slots.pop(0)
        self.rows.append(row)
        self._new.append(row)

    def finish(self, row: Row, shared_blocks: int = 0) -> None:
        self._finished.append(row.slot)
        self._leave(row, shared_blocks)

    def preempt(self, row: Row) -> None:
        self._preempted.append(row.slot)
        self._leave(row, 0)
        row.blocks, row.computed = [], 0

    def _leave(self, row: Row, shared_blocks: int) -> None:
        self.rows.remove(row)
        self.free_slots.append(row.slot)
        self.free_blocks.extend(row.blocks[shared_blocks:])

    def build(self, chunks: dict[Row, int]) -> SchedulerOutput:
        """The step that runs these rows for so many tokens, with whatever entered and left since the last."""
        new_block_slots: list[int] = []
        new_block_ids: list[int] = []
        for row, count in chunks.items():
            while len(row.blocks) * self.block_size < row.computed + count:
                block = self.free_blocks.pop(0)
                row.blocks.append(block)
                if row not in self._new:
                    new_block_slots.append(row.slot)
                    new_block_ids.append(block)
        self._step_id += 1
        step = SchedulerOutput(
            self._step_id,
            int32s([row.slot for row in chunks]),
            int32s(list(chunks.values())),
            int32s([row.computed for row in chunks]),
            [
                NewRequest(
                    row.slot,
                    row.request_id,
                    int32s(row.tokens),
                    len(row.prompt),
                    row.computed,
                    int32s(row.blocks),
                    row.params,
                )
                for row in self._new
            ],
            int32s(new_block_slots),
            int32s(new_block_ids),
            int32s(self._finished),
            int32s(self._preempted),
        )
        self._new, self._finished, self._preempted = [], [], []
        return step

    def take_in(self, chunks: dict[Row, int], output: ModelRunnerOutput) -> None:
        for i, (row, count) in enumerate(chunks.items()):
            row.computed += count
            row.tokens.extend(output.sampled_token_ids[i, : output.num_sampled[i]].tolist())

    def run(self, execute: Execute, chunks: dict[Row, int] | None = None) -> ModelRunnerOutput:
        """One step; by default every row computes all it can."""
        if chunks is None:
            chunks = {row: len(row.tokens) - row.computed for row in self.rows}
        output = execute(self.build(chunks))
        self.take_in(chunks, output)
        return output
