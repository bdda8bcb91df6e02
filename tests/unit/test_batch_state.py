from __future__ import annotations

import numpy as np
import pytest

from executor.batch_state import BatchState, BatchStateError
from executor.sampling_params import SamplingParams
from executor.step import EMPTY, ModelRunnerOutput, NewRequest, SchedulerOutput
from tests.batch_driver import BatchDriver, int32s

S, L, B = 8, 64, 4


@pytest.fixture
def batch() -> BatchState:
    return BatchState(S, L, B)


def new(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequest:
    return NewRequest(
        slot, f"id{slot}", int32s(tokens), len(tokens), computed, int32s(blocks), SamplingParams()
    )


def step_of(rows: list[tuple[int, int, int]], step_id: int = 1, **deltas: object) -> SchedulerOutput:
    """Rows of (slot, scheduled, computed)."""
    slots, scheduled, computed = (
        (int32s(list(column)) for column in zip(*rows, strict=True)) if rows else (EMPTY,) * 3
    )
    return SchedulerOutput(step_id, slots, scheduled, computed, **deltas)  # type: ignore[arg-type]


def output_of(step: SchedulerOutput, tokens: list[int], counts: list[int]) -> ModelRunnerOutput:
    return ModelRunnerOutput(step.step_id, int32s(tokens)[:, None], int32s(counts))


def test_new_requests_fill_their_rows(batch: BatchState) -> None:
    batch.apply(step_of([(3, 5, 0)], new_requests=[new(3, [9, 8, 7, 6, 5], [11, 12])]))
    assert batch.request_ids[3] == "id3"
    assert batch.token_ids[3, :5].tolist() == [9, 8, 7, 6, 5]
    assert batch.block_table[3, :2].tolist() == [11, 12]
    assert (batch.num_tokens[3], batch.num_prompt_tokens[3], batch.num_blocks[3]) == (5, 5, 2)


def test_only_the_step_that_computes_the_last_known_token_samples(batch: BatchState) -> None:
    first = step_of([(0, 3, 0), (1, 2, 0)], new_requests=[new(0, [1] * 5, [1, 2]), new(1, [2] * 2, [3])])
    batch.apply(first)
    assert batch.samples(first).tolist() == [False, True]
    batch.record(first, output_of(first, [0, 42], [0, 1]))
    second = step_of([(0, 2, 3), (1, 1, 2)], 2)
    batch.apply(second)
    assert batch.samples(second).tolist() == [True, True]
    batch.record(second, output_of(second, [50, 43], [1, 1]))
    assert batch.token_ids[0, :6].tolist() == [1] * 5 + [50]
    assert batch.token_ids[1, :4].tolist() == [2, 2, 42, 43]
    assert batch.num_computed_tokens[:2].tolist() == [5, 3]


def test_several_tokens_per_row_are_recorded_up_to_each_rows_count(batch: BatchState) -> None:
    step = step_of([(0, 1, 0), (1, 1, 0)], new_requests=[new(0, [1], [1]), new(1, [2], [2])])
    batch.apply(step)
    batch.record(step, ModelRunnerOutput(1, np.array([[5, 6], [7, 99]], np.int32), int32s([2, 1])))
    assert batch.token_ids[0, :3].tolist() == [1, 5, 6]
    assert batch.token_ids[1, :3].tolist() == [2, 7, 0]
    assert batch.num_tokens[:2].tolist() == [3, 2]


def test_blocks_are_appended_in_order_whatever_the_columns_order(batch: BatchState) -> None:
    batch.apply(step_of([(0, 1, 0), (1, 1, 0)], new_requests=[new(0, [1] * 20, [1]), new(1, [2] * 20, [2])]))
    batch.num_computed_tokens[:2] = 1
    batch.apply(
        step_of(
            [(1, 15, 1), (0, 7, 1)],
            new_block_slots=int32s([1, 0, 1, 1]),
            new_block_ids=int32s([21, 11, 22, 23]),
        )
    )
    assert batch.block_table[0, :2].tolist() == [1, 11]
    assert batch.block_table[1, :4].tolist() == [2, 21, 22, 23]
    assert batch.num_blocks[:2].tolist() == [2, 4]


def test_a_slot_can_be_left_and_taken_in_one_step(batch: BatchState) -> None:
    batch.apply(step_of([(0, 1, 0), (1, 1, 0)], new_requests=[new(0, [1], [1]), new(1, [1], [2])]))
    batch.apply(
        step_of(
            [(0, 2, 0), (1, 2, 0)],
            finished_slots=int32s([0]),
            preempted_slots=int32s([1]),
            new_requests=[new(0, [4, 4], [2]), new(1, [5, 5], [1])],
        )
    )
    assert batch.token_ids[:2, :2].tolist() == [[4, 4], [5, 5]]


def test_a_left_slot_holds_no_request(batch: BatchState) -> None:
    batch.apply(step_of([(0, 1, 0)], new_requests=[new(0, [1], [1])]))
    batch.apply(step_of([], finished_slots=int32s([0])))
    assert batch.request_ids[0] is batch.params[0] is batch.loras[0] is None
    assert not batch.live.any()


def test_model_inputs_are_flat_row_after_row(batch: BatchState) -> None:
    step = step_of(
        [(2, 3, 4), (0, 1, 0), (5, 2, 0)],
        new_requests=[
            new(2, list(range(10, 17)), [7, 9], computed=4),
            new(0, [50], [3]),
            new(5, [60, 61], [4]),
        ],
    )
    batch.apply(step)
    assert batch.query_start_loc(step).tolist() == [0, 3, 4, 6]
    assert batch.token_slots(step).tolist() == [2, 2, 2, 0, 5, 5]
    assert batch.positions(step).tolist() == [4, 5, 6, 0, 0, 1]
    assert batch.input_ids(step).tolist() == [14, 15, 16, 50, 60, 61]
    assert batch.slot_mapping(step).tolist() == [36, 37, 38, 12, 16, 17]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (step_of([(1, 1, 0)]), "slot 1 is scheduled, but nothing runs in it"),
        (step_of([(0, 1, 2)]), "has 0 tokens computed, the step says 2"),
        (step_of([(0, 4, 0)]), "is to compute 4 tokens, but has only 3"),
        (step_of([(0, 0, 0)]), "is scheduled for 0 tokens"),
        (step_of([(0, 3, 0), (0, 3, 0)]), "is scheduled twice in one step"),
        (step_of([(0, 3, 0)], finished_slots=int32s([4])), "slot 4 is finished, but nothing runs in it"),
        (step_of([(0, 3, 0)], new_requests=[new(0, [1], [1])]), "is given slot 0 of request id0"),
        (step_of([(0, 3, 0)], new_requests=[new(S, [1], [1])]), f"slot {S} of {S}"),
        (step_of([(0, 3, 0)], new_requests=[new(1, [1] * 65, [1])]), "65 tokens"),
        (step_of([(1, 5, 0)], new_requests=[new(1, [1] * 5, [1])]), "1 blocks, too few for 5 tokens"),
        (step_of([(-1, 1, 0)]), "slots -1..-1"),
        (step_of([], new_block_slots=int32s([1]), new_block_ids=int32s([1])), "slot 1 is given a block"),
        (
            step_of([], new_block_slots=int32s([0] * 16), new_block_ids=int32s([1] * 16)),
            "is given more than 16 blocks",
        ),
    ],
)
def test_a_step_that_contradicts_the_batch_is_refused(
    batch: BatchState, step: SchedulerOutput, message: str
) -> None:
    batch.apply(step_of([], new_requests=[new(0, [1, 2, 3], [1])]))
    with pytest.raises(BatchStateError, match=message):
        batch.apply(step)


def test_a_step_is_recorded_once(batch: BatchState) -> None:
    step = step_of([(0, 1, 0)], new_requests=[new(0, [1], [1])])
    batch.apply(step)
    batch.record(step, output_of(step, [5], [1]))
    with pytest.raises(BatchStateError, match="not the one that was applied last"):
        batch.record(step, output_of(step, [5], [1]))


def test_a_sequence_cannot_outgrow_the_model(batch: BatchState) -> None:
    full = step_of([(0, L, 0)], new_requests=[new(0, [1] * L, list(range(1, 17)))])
    batch.apply(full)
    with pytest.raises(BatchStateError, match="grows beyond the model's 64 tokens"):
        batch.record(full, output_of(full, [1], [1]))


def decoding(batch: BatchState) -> list[tuple[int, int, int]]:
    """Two requests with 16 places each were given three tokens each: the rows of the next step."""
    rows = [(0, 10, 0), (1, 9, 0)]
    deltas: dict[str, object] = {
        "new_requests": [new(0, [1] * 10, [1, 2, 3, 4]), new(1, [2] * 9, [5, 6, 7, 8])]
    }
    for number in range(3):
        step = step_of(rows, number, **deltas)
        batch.apply(step)
        batch.record(step, output_of(step, [number, number + 10], [1, 1]))
        rows, deltas = [(slot, 1, computed + count) for slot, count, computed in rows], {}
    return rows


def decode_on(batch: BatchState, rows: list[tuple[int, int, int]]) -> None:
    for number in range(4, 12):
        step = step_of(rows, number)
        batch.apply(step)
        batch.record(step, output_of(step, [1, 1], [1, 1]))
        rows = [(slot, 1, computed + 1) for slot, _, computed in rows]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 1, 12), (1, 1, 12)], "has 11 tokens computed, the step says 12"),
        ([(0, 2, 12), (1, 1, 11)], "is to compute 14 tokens, but has only 13"),
        ([(0, 1, 12), (0, 1, 12)], "is scheduled twice in one step"),
        ([(0, 1, 12), (2, 1, 11)], "slot 2 is scheduled, but nothing runs in it"),
    ],
)
def test_a_contradiction_in_the_midst_of_decoding_is_refused(
    batch: BatchState, rows: list[tuple[int, int, int]], message: str
) -> None:
    assert decoding(batch) == [(0, 1, 12), (1, 1, 11)]
    with pytest.raises(BatchStateError, match=message):
        batch.apply(step_of(rows, 4))


def test_a_decoding_row_without_a_block_for_its_token_is_refused(batch: BatchState) -> None:
    rows = decoding(batch)
    with pytest.raises(BatchStateError, match=r"request id0 .* has 4 blocks, too few for 17 tokens"):
        decode_on(batch, rows)


def test_a_decoding_sequence_cannot_outgrow_the_model() -> None:
    batch = BatchState(S, 15, B)
    rows = decoding(batch)
    with pytest.raises(BatchStateError, match=r"request id0 .* grows beyond the model's 15 tokens"):
        decode_on(batch, rows)


@pytest.mark.parametrize(("leave", "enter", "run"), [(0.03, 0.5, 0.8), (0.005, 0.1, 1.0)])
def test_random_traffic_keeps_the_twin_equal_to_the_driver(leave: float, enter: float, run: float) -> None:
    rng = np.random.default_rng(7)
    batch = BatchState(S, L, B)
    driver = BatchDriver(num_blocks=S * (L // B) + 1, block_size=B, max_num_seqs=S)

    def execute(step: SchedulerOutput) -> ModelRunnerOutput:
        batch.apply(step)
        counts = batch.samples(step).astype(np.int32)
        output = ModelRunnerOutput(step.step_id, rng.integers(0, 99, (len(counts), 1), np.int32), counts)
        batch.record(step, output)
        return output

    for _ in range(1000):
        for row in list(driver.rows):
            if len(row.tokens) >= L or rng.random() < leave:
                driver.finish(row)
            elif rng.random() < leave:
                driver.preempt(row)
                driver.enter(row)
        if driver.free_slots and rng.random() < enter:
            driver.add(rng.integers(0, 99, rng.integers(1, L)).tolist())
        rows = [row for row in driver.rows if row in driver._new or rng.random() < run]
        left = {row: len(row.tokens) - row.computed for row in rows}
        driver.run(execute, {row: int(rng.integers(1, count + 1)) for row, count in left.items()})
        assert sorted(np.flatnonzero(batch.live).tolist()) == sorted(row.slot for row in driver.rows)
        for row in driver.rows:
            assert batch.request_ids[row.slot] == row.request_id
            assert batch.token_ids[row.slot, : batch.num_tokens[row.slot]].tolist() == row.tokens
            assert batch.block_table[row.slot, : batch.num_blocks[row.slot]].tolist() == row.blocks
            assert batch.num_computed_tokens[row.slot] == row.computed
