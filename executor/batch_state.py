"""The running batch as a rank knows it: the worker-side twin of the scheduler's columns.

`BatchState` applies each `SchedulerOutput`'s deltas, so that a worker reads token ids, positions and block
tables by slot, ready to use. It is strict: a step that contradicts what it knows raises `BatchStateError`
rather than computing something wrong.

Memory is reserved, not used: the large arrays are zero pages until a request touches its row.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from executor.sampling_params import SamplingParams
from executor.steady_rows import SteadyRows
from executor.step import Int32s, LoRARequest, ModelRunnerOutput, NewRequest, SchedulerOutput

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class BatchStateError(Exception):
    """A step contradicts the batch it applies to."""


class BatchState:
    """Columns by slot; S = `max_num_seqs`. What is in the rows of slots that are not live means nothing.

    - `request_ids`, `params`, `loras`: lists of S; None where the slot is not live
    - `live` bool (S,)
    - `num_prompt_tokens` int32 (S,)
    - `num_tokens` int32 (S,): tokens known: the prompt and what was sampled
    - `num_computed_tokens` int32 (S,): whose KV is in the cache, before the step that runs
    - `token_ids` int32 (S, max_model_len)
    - `block_table` int32 (S, ceil(max_model_len / block_size)), `num_blocks` int32 (S,)
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.request_ids: list[str | None] = [None] * max_num_seqs
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self.loras: list[LoRARequest | None] = [None] * max_num_seqs
        self.live = np.zeros(max_num_seqs, np.bool_)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.full(max_num_seqs, -1, np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.token_ids = _sparse_zeros(max_num_seqs, max_model_len)
        self.block_table = _sparse_zeros(max_num_seqs, -(-max_model_len // block_size))
        self._flat_token_ids = self.token_ids.reshape(-1)
        self._flat_block_table = self.block_table.reshape(-1)
        self._row_starts = np.arange(max_num_seqs, dtype=np.int64) * max_model_len
        self._block_row_starts = np.arange(max_num_seqs, dtype=np.int64) * self.block_table.shape[1]
        self._numbers = np.arange(max_num_seqs, dtype=np.int32)
        self._scratch = np.zeros(max_num_seqs, np.int32)
        self._step: SchedulerOutput | None = None  # applied, not yet recorded
        self._ends: Int32s
        self._known: Int32s
        self._samples: Bools
        self._steady: SteadyRows | None = None
        self._last_slots = b""

    def apply(self, step: SchedulerOutput) -> None:
        """Take in the deltas: slots that left, new requests, new blocks. Then `step`'s rows are ready to run.

        Raises `BatchStateError`; the state is then undefined.
        """
        same_requests = not (len(step.finished_slots) or len(step.preempted_slots) or step.new_requests)
        if len(step.finished_slots):
            self._remove(step.finished_slots, "finished")
        if len(step.preempted_slots):
            self._remove(step.preempted_slots, "preempted")
        for request in step.new_requests:
            self._add(request)
        if len(step.new_block_slots):
            self._append_blocks(step.new_block_slots, step.new_block_ids)
        if not (same_requests and self._prepare_steady_rows(step)):
            self._prepare_rows(step)

    def samples(self, step: SchedulerOutput) -> Bools:
        """Which of the applied `step`'s rows sample: those that compute the last of their known tokens.
        (n,)"""
        self._require(step)
        return self._samples

    def record(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Append the sampled tokens and count the scheduled ones as computed. Called once, after the worker
        ran."""
        self._require(step)
        slots, tokens, counts = step.slots, output.sampled_token_ids, output.num_sampled
        steady = self._steady
        if steady is not None and steady.have_sampled(tokens, counts, self.max_model_len):
            self._flat_token_ids[steady.next_at] = tokens[:, 0]
            self.num_tokens[slots] = steady.ends + 1
            steady.advance()
        else:
            self._steady = None
            self._record_rows(slots, tokens, counts)
        self.num_computed_tokens[slots] = self._ends
        self._step = None

    def _record_rows(self, slots: Int32s, tokens: Int32s, counts: Int32s) -> None:
        known = self._known
        total = known + counts
        if len(slots) and int(total.max()) > self.max_model_len:
            slot = int(slots[total.argmax()])
            raise BatchStateError(f"{self._name(slot)} grows beyond the model's {self.max_model_len} tokens")
        at = self._row_starts[slots] + known
        for column in range(tokens.shape[1]):
            rows = counts > column
            if rows.all():
                self._flat_token_ids[at + column if column else at] = tokens[:, column]
            else:
                self._flat_token_ids[at[rows] + column] = tokens[rows, column]
        self.num_tokens[slots] = total

    # What a model's inputs are made of. All are flat over the step's tokens, row after row.

    def query_start_loc(self, step: SchedulerOutput) -> Int32s:
        """Where each row's tokens begin in the flat arrays, and their total at the end. (n + 1,)"""
        starts = np.zeros(len(step.slots) + 1, np.int32)
        np.cumsum(step.num_scheduled_tokens, out=starts[1:])
        return starts

    def token_slots(self, step: SchedulerOutput) -> Int32s:
        """The slot of each scheduled token. (total,)"""
        return np.repeat(step.slots, step.num_scheduled_tokens)

    def positions(self, step: SchedulerOutput) -> Int32s:
        """The position in its sequence of each scheduled token. (total,)"""
        counts = step.num_scheduled_tokens
        total = int(counts.sum())
        if total == len(counts):
            return step.num_computed_tokens
        first = np.cumsum(counts, dtype=np.int32) - counts
        positions: Int32s = np.repeat(step.num_computed_tokens - first, counts)
        positions += np.arange(total, dtype=np.int32)
        return positions

    def input_ids(self, step: SchedulerOutput) -> Int32s:
        """The token id of each scheduled token. (total,)"""
        at = self._row_starts[self.token_slots(step)] + self.positions(step)
        ids: Int32s = self._flat_token_ids[at]
        return ids

    def slot_mapping(self, step: SchedulerOutput) -> Int64s:
        """Where each scheduled token's KV goes: block id * block size + offset in the block. (total,)"""
        return self.kv_slots(self.token_slots(step), self.positions(step))

    def kv_slots(self, slots: Int32s, positions: Int32s) -> Int64s:
        """Where the KV of `positions` of `slots` (equal shapes) is in a cache of (num_blocks * block_size)
        rows."""
        index, offset = np.divmod(positions, self.block_size)
        at = slots.astype(np.int64) * self.block_table.shape[1] + index
        kv_slots: Int64s = self._flat_block_table[at].astype(np.int64) * self.block_size + offset
        return kv_slots

    def _remove(self, slots: Int32s, how: str) -> None:
        self._check_slots(slots)
        if not self.live[slots].all():
            slot = int(slots[~self.live[slots]][0])
            raise BatchStateError(f"slot {slot} is {how}, but nothing runs in it")
        self.live[slots] = False
        self.num_computed_tokens[slots] = -1
        for slot in slots.tolist():
            self.request_ids[slot] = self.params[slot] = self.loras[slot] = None

    def _add(self, request: NewRequest) -> None:
        slot, known, blocks = request.slot, len(request.token_ids), len(request.block_ids)
        if not 0 <= slot < self.max_num_seqs:
            raise BatchStateError(f"request {request.request_id} is given slot {slot} of {self.max_num_seqs}")
        if self.live[slot]:
            raise BatchStateError(f"request {request.request_id} is given slot {slot} of {self._name(slot)}")
        if known > self.max_model_len or blocks > self.block_table.shape[1]:
            raise BatchStateError(
                f"request {request.request_id} has {known} tokens and {blocks} blocks; "
                f"the model allows {self.max_model_len} and {self.block_table.shape[1]}"
            )
        if not 0 <= request.num_computed_tokens < known or not 0 < request.num_prompt_tokens <= known:
            raise BatchStateError(
                f"request {request.request_id} has {known} tokens, {request.num_prompt_tokens} of them "
                f"prompt and {request.num_computed_tokens} computed"
            )
        self.live[slot] = True
        self.request_ids[slot] = request.request_id
        self.params[slot] = request.params
        self.loras[slot] = request.lora
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_tokens[slot] = known
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.token_ids[slot, :known] = request.token_ids
        self.num_blocks[slot] = blocks
        self.block_table[slot, :blocks] = request.block_ids

    def _append_blocks(self, slots: Int32s, block_ids: Int32s) -> None:
        self._check_slots(slots)
        if not self.live[slots].all():
            slot = int(slots[~self.live[slots]][0])
            raise BatchStateError(f"slot {slot} is given a block, but nothing runs in it")
        totals = self.num_blocks[slots] + 1
        if not self._are_last(slots).all():
            totals += _occurrences_before(slots)
        if int(totals.max()) > self.block_table.shape[1]:
            slot = int(slots[totals.argmax()])
            raise BatchStateError(f"{self._name(slot)} is given more than {self.block_table.shape[1]} blocks")
        self._flat_block_table[self._block_row_starts[slots] + totals - 1] = block_ids
        self.num_blocks[slots] = totals  # of a slot that is there twice, the last and largest stays

    def _prepare_steady_rows(self, step: SchedulerOutput) -> bool:
        """Like `_prepare_rows`, if these are the rows of the last step, each with its next token."""
        steady = self._steady
        if steady is None or not steady.are_in(step):
            return False
        if len(step.new_block_slots):
            steady.limits = self.num_blocks.take(step.slots) * self.block_size
        if not steady.begin_step():
            return False
        self._step = step
        self._ends = self._known = steady.ends
        self._samples = steady.samples
        return True

    def _prepare_rows(self, step: SchedulerOutput) -> None:
        """Check the rows to run, and keep what is asked for again while they run."""
        slots, computed = step.slots, step.num_computed_tokens
        if len(slots):
            self._check_slots(slots)
        ends = computed + step.num_scheduled_tokens
        known = self.num_tokens[slots]
        limits = self.num_blocks[slots] * self.block_size
        right = self.num_computed_tokens[slots] == computed
        right &= ends > computed
        right &= ends <= known
        right &= ends <= limits
        right &= self._are_last(slots)
        if not right.all():
            raise BatchStateError(self._what_is_wrong(step, int(right.argmin())))
        samples = ends == known
        samples.flags.writeable = False
        self._step = step
        self._ends = ends
        self._known = known
        self._samples = samples
        self._steady = None
        slots_now = slots.tobytes()
        if slots_now == self._last_slots and len(slots) and samples.all():
            self._steady = SteadyRows(slots_now, ends, limits, self._row_starts[slots])
        self._last_slots = slots_now

    def _what_is_wrong(self, step: SchedulerOutput, row: int) -> str:
        slot, computed = int(step.slots[row]), int(step.num_computed_tokens[row])
        count = int(step.num_scheduled_tokens[row])
        end = computed + count
        if not self.live[slot]:
            return f"slot {slot} is scheduled, but nothing runs in it"
        name = self._name(slot)
        if self.num_computed_tokens[slot] != computed:
            return f"{name} has {self.num_computed_tokens[slot]} tokens computed, the step says {computed}"
        if count < 1:
            return f"{name} is scheduled for {count} tokens"
        if end > self.num_tokens[slot]:
            return f"{name} is to compute {end} tokens, but has only {self.num_tokens[slot]}"
        if end > self.num_blocks[slot] * self.block_size:
            return f"{name} has {self.num_blocks[slot]} blocks, too few for {end} tokens"
        return f"{name} is scheduled twice in one step"

    def _require(self, step: SchedulerOutput) -> None:
        if step is not self._step:
            raise BatchStateError(f"step {step.step_id} is not the one that was applied last")

    def _are_last(self, slots: Int32s) -> Bools:
        """Which of them are not there again later. (n,)"""
        n = len(slots)
        numbers = self._numbers[:n] if n <= self.max_num_seqs else np.arange(n, dtype=np.int32)
        self._scratch[slots] = numbers
        last: Bools = self._scratch[slots] == numbers
        return last

    def _check_slots(self, slots: Int32s) -> None:
        if int(slots.view(np.uint32).max()) >= self.max_num_seqs:  # negative ones, too
            raise BatchStateError(f"slots {slots.min()}..{slots.max()} of a batch of {self.max_num_seqs}")

    def _name(self, slot: int) -> str:
        return f"request {self.request_ids[slot]} (slot {slot})"


def _occurrences_before(slots: Int32s) -> Int32s:
    """How often each one has been there before. (n,)"""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    first = np.ones(len(slots), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    before = np.empty(len(slots), np.int32)
    before[order] = np.arange(len(slots)) - np.repeat(starts, np.diff(starts, append=len(slots)))
    return before


def _sparse_zeros(rows: int, columns: int) -> Int32s:
    """Zeros that take memory only page by page: numpy's own would take 2 MiB for the first token of a row."""
    pages = mmap.mmap(-1, max(rows * columns * 4, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages has none to refuse
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.int32, rows * columns).reshape(rows, columns)
