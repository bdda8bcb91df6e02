"""Steps and their outputs as bytes.

All columns of a message, int32 and float32, travel end to end in one array beside a small msgpack head, so
the cost of a step grows with its rows only by the copying of their bytes. Both messages carry the executor's
number `seq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from executor.sampling_params import SamplingParams
from executor.step import (
    Float32s,
    Int32s,
    Logprobs,
    LoRARequest,
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SchedulerOutput,
)
from transport.codec import encode

if TYPE_CHECKING:
    from transport.ring import Buffer

STEP, OUTPUT = 1, 2  # kinds of message


class BadMessage(Exception):
    """A message whose head and columns contradict each other."""


class _New(msgspec.Struct, array_like=True):
    slot: int
    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_blocks: int
    params: SamplingParams
    lora: LoRARequest | None


class _StepHead(msgspec.Struct, array_like=True):
    seq: int
    step_id: int
    rows: int
    new_blocks: int
    finished: int
    preempted: int
    new: list[_New]


_step_head = msgspec.msgpack.Decoder(_StepHead)


def encode_step(seq: int, step: SchedulerOutput) -> list[Buffer]:
    """Parts of the message that has every rank run `step`."""
    columns = [step.slots, step.num_scheduled_tokens, step.num_computed_tokens]
    m, f, p = len(step.new_block_ids), len(step.finished_slots), len(step.preempted_slots)
    if m:
        columns += (step.new_block_slots, step.new_block_ids)
    if f:
        columns.append(step.finished_slots)
    if p:
        columns.append(step.preempted_slots)
    new = []
    for r in step.new_requests:
        columns += (r.token_ids, r.block_ids)
        new.append(
            _New(
                r.slot,
                r.request_id,
                len(r.token_ids),
                r.num_prompt_tokens,
                r.num_computed_tokens,
                len(r.block_ids),
                r.params,
                r.lora,
            )
        )
    head = _StepHead(seq, step.step_id, len(step.slots), m, f, p, new)
    return encode(STEP, head, (_joined(columns),))


def decode_step(head: memoryview, arrays: Sequence[npt.NDArray[Any]]) -> tuple[int, SchedulerOutput]:
    """The message's number and its step, whose arrays are read-only views of the message."""
    h = _step_head.decode(head)
    ints: Int32s = arrays[0]
    n = h.rows
    cut = _Cutter(ints, 3 * n)
    step = SchedulerOutput(h.step_id, ints[:n], ints[n : 2 * n], ints[2 * n : 3 * n])
    if h.new_blocks:
        step.new_block_slots = cut.ints(h.new_blocks)
        step.new_block_ids = cut.ints(h.new_blocks)
    if h.finished:
        step.finished_slots = cut.ints(h.finished)
    if h.preempted:
        step.preempted_slots = cut.ints(h.preempted)
    for r in h.new:
        token_ids, block_ids = cut.ints(r.num_tokens), cut.ints(r.num_blocks)
        step.new_requests.append(
            NewRequest(
                r.slot,
                r.request_id,
                token_ids,
                r.num_prompt_tokens,
                r.num_computed_tokens,
                block_ids,
                r.params,
                r.lora,
            )
        )
    return h.seq, step


class _OutputHead(msgspec.Struct, array_like=True):
    seq: int
    step_id: int
    rows: int
    width: int
    logprobs: tuple[int, int] | None  # lines, columns
    prompt_logprobs: list[tuple[int, int, int]]  # row, lines, columns


_output_head = msgspec.msgpack.Decoder(_OutputHead)


def encode_output(seq: int, output: ModelRunnerOutput) -> list[Buffer]:
    """Parts of the answer to step message `seq`."""
    rows, width = output.sampled_token_ids.shape
    columns = [output.sampled_token_ids.reshape(-1), output.num_sampled]
    logprobs = None
    if output.logprobs is not None:
        lines = output.logprobs
        logprobs = lines.token_ids.shape
        columns += (lines.rows, *_columns_of(lines))
    prompt = []
    for prompt_lines in output.prompt_logprobs:
        prompt.append((prompt_lines.row, *prompt_lines.token_ids.shape))
        columns += _columns_of(prompt_lines)
    head = _OutputHead(seq, output.step_id, rows, width, logprobs, prompt)
    return encode(OUTPUT, head, (_joined(columns),))


def decode_output(head: memoryview, arrays: Sequence[npt.NDArray[Any]]) -> tuple[int, ModelRunnerOutput]:
    """The number of the step message it answers, and the output, whose arrays are views of the message."""
    h = _output_head.decode(head)
    cut = _Cutter(arrays[0])
    tokens = cut.ints(h.rows * h.width).reshape(h.rows, h.width)
    output = ModelRunnerOutput(h.step_id, tokens, cut.ints(h.rows))
    if h.logprobs is not None:
        output.logprobs = Logprobs(cut.ints(h.logprobs[0]), *cut.lines(*h.logprobs))
    for row, lines, columns in h.prompt_logprobs:
        output.prompt_logprobs.append(PromptLogprobs(row, *cut.lines(lines, columns)))
    return h.seq, output


def _columns_of(lines: Logprobs | PromptLogprobs) -> tuple[Int32s, Int32s, Int32s]:
    logprobs = np.ascontiguousarray(lines.logprobs).view(np.int32)
    return lines.token_ids.reshape(-1), logprobs.reshape(-1), lines.ranks


class _Cutter:
    """Takes columns off the front of an array."""

    def __init__(self, ints: Int32s, at: int = 0) -> None:
        self._ints = ints
        self._at = at

    def ints(self, count: int) -> Int32s:
        end = self._at + count
        if end > len(self._ints):
            raise BadMessage(f"columns of {end} numbers announced, {len(self._ints)} received")
        column = self._ints[self._at : end]
        self._at = end
        return column

    def lines(self, lines: int, columns: int) -> tuple[Int32s, Float32s, Int32s]:
        token_ids = self.ints(lines * columns).reshape(lines, columns)
        logprobs = self.ints(lines * columns).view(np.float32).reshape(lines, columns)
        return token_ids, logprobs, self.ints(lines)


def _joined(columns: list[Int32s]) -> Int32s:
    joined = np.concatenate(columns)
    if joined.dtype != np.int32:
        found = {str(column.dtype) for column in columns} - {"int32"}
        raise TypeError(f"a step's columns are int32, not {', '.join(sorted(found))}")
    return joined
