from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from executor.config import ExecutorConfig
from executor.errors import WorkerFailed, WorkerStartFailed
from executor.mock_model import SEED, A, C, chain, judge, mock_tokens, prompt_digests
from executor.sampling_params import SamplingParams
from executor.uniproc import UniProcExecutor
from tests.batch_driver import BatchDriver, Row, int32s

MASK = (1 << 64) - 1
MakeExecutor = Callable[..., UniProcExecutor]


def naive_chain(digest: int, tokens: list[int]) -> list[int]:
    digests = []
    for token in tokens:
        digest = (digest * A + token + C) & MASK
        digests.append(digest)
    return digests


@pytest.fixture
def make() -> Iterator[MakeExecutor]:
    made: list[UniProcExecutor] = []

    def make(worker_options: dict[str, Any] | None = None, **config: Any) -> UniProcExecutor:
        options = {"mock_num_blocks": 512, **(worker_options or {})}
        made.append(UniProcExecutor(ExecutorConfig(worker_options=options, **config)))
        made[-1].initialize()
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 32000, n).tolist()


def test_the_closed_form_equals_the_loop() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 700, 30)
    tokens = rng.integers(0, 32000, counts.sum()).astype(np.int32)
    before = rng.integers(0, 1 << 63, len(counts), np.uint64) * np.uint64(2)
    expected: list[int] = []
    for digest, chunk in zip(before.tolist(), np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
        expected += naive_chain(digest, chunk.tolist())
    assert chain(before, tokens, counts).tolist() == expected


def test_mock_tokens_follow_their_definition() -> None:
    tokens = prompt(37)
    for token in mock_tokens(tokens, 20).tolist():
        assert token == (naive_chain(SEED, tokens)[-1] >> 33) % 32000
        tokens.append(token)


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_prefill_in_chunks_gives_the_pure_functions_tokens(make: MakeExecutor, chunk: int) -> None:
    executor, driver = make(), BatchDriver()
    rows = [driver.add(prompt(40 + i, i)) for i in range(5)]
    while len(rows[-1].output) < 40:
        driver.run(executor.execute_model, {r: min(chunk, len(r.tokens) - r.computed) for r in rows})
    for row in rows:
        row.assert_right()


def test_a_prefix_hit_reads_what_another_request_wrote(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    common = prompt(64)
    first = driver.add(common + prompt(5, 1))
    driver.run(executor.execute_model)
    second = driver.add(common + prompt(9, 2), shares=first, hit_blocks=4)
    for _ in range(30):
        driver.run(executor.execute_model)
    first.assert_right()
    second.assert_right()


def test_a_hit_may_be_on_blocks_that_the_same_step_computes(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    common = prompt(64)
    first = driver.add([*common, 1])
    first.blocks = [driver.free_blocks.pop(0) for _ in range(5)]
    second = driver.add([*common, *prompt(40, 2), 3], shares=first, hit_blocks=4)
    second.blocks += [driver.free_blocks.pop(0) for _ in range(3)]
    third = driver.add([*common, *prompt(40, 2), 4, 5], shares=second, hit_blocks=6)
    for _ in range(20):
        driver.run(executor.execute_model)
    for row in (first, second, third):
        row.assert_right()


def test_blocks_are_reused_after_finish_and_preemption(make: MakeExecutor) -> None:
    executor, driver = make(num_gpu_blocks=20), BatchDriver(num_blocks=20)
    kept = driver.add(prompt(30))
    driver.run(executor.execute_model)
    for seed in range(10):
        other = driver.add(prompt(100, seed))
        driver.run(executor.execute_model)
        other.assert_right()
        driver.finish(other)
        driver.preempt(kept)
        driver.enter(kept)
        driver.run(executor.execute_model)
    kept.assert_right()


def tampered(make: MakeExecutor, tamper: Callable[[UniProcExecutor, Row, Row], None]) -> Row:
    executor, driver = make(), BatchDriver()
    row, other = driver.add(prompt(40)), driver.add(prompt(40, 1))
    driver.run(executor.execute_model)
    driver.run(executor.execute_model)
    tamper(executor, row, other)
    # A changed token shows one step later: it moves the digest's low bits, and those are not sampled.
    driver.run(executor.execute_model)
    driver.run(executor.execute_model)
    return row


def wrong_block_table(executor: UniProcExecutor, row: Row, other: Row) -> None:
    executor._host.batch.block_table[row.slot, 2] = other.blocks[2]


def lost_token(executor: UniProcExecutor, row: Row, other: Row) -> None:
    executor._host.batch.token_ids[row.slot, 41] = 0


def stale_block(executor: UniProcExecutor, row: Row, other: Row) -> None:
    executor._host.worker.kv_cache[row.blocks[2] * 16 : row.blocks[2] * 16 + 16] = 7  # type: ignore[attr-defined]


@pytest.mark.parametrize("tamper", [wrong_block_table, lost_token, stale_block])
def test_an_error_of_bookkeeping_changes_the_output(
    make: MakeExecutor, tamper: Callable[[UniProcExecutor, Row, Row], None]
) -> None:
    with pytest.raises(AssertionError):
        tampered(make, tamper).assert_right()


@pytest.mark.parametrize("hit_blocks", [1, 2, 4])
def test_a_false_prefix_hit_changes_the_output(make: MakeExecutor, hit_blocks: int) -> None:
    executor, driver = make(), BatchDriver()
    first = driver.add(prompt(80))
    driver.run(executor.execute_model)
    second = driver.add([5, *first.prompt[1:], 1], shares=first, hit_blocks=hit_blocks)
    driver.run(executor.execute_model)
    with pytest.raises(AssertionError):
        second.assert_right()


def test_a_hit_with_one_block_in_the_middle_wrong_changes_the_output(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    first = driver.add(prompt(80))
    driver.run(executor.execute_model)
    second = driver.add([*first.prompt, 1], shares=first, hit_blocks=4)
    second.blocks[1] = 300
    driver.run(executor.execute_model)
    with pytest.raises(AssertionError):
        second.assert_right()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 50], r"block ids \[0\]"),
        ([50, 512], r"block ids \[512\]"),
        ([-1, 50], r"block ids \[-1\]"),
        ([50, 50], "a block twice"),
        ([1, 50], "block 1 is given out to be written while slot 0 holds it"),
    ],
)
def test_blocks_that_a_request_must_not_have_are_refused(
    make: MakeExecutor, blocks: list[int], message: str
) -> None:
    executor, driver = make(), BatchDriver()
    driver.add(prompt(20))
    driver.run(executor.execute_model)
    row = driver.add(prompt(20, 1))
    row.blocks = blocks
    with pytest.raises(WorkerFailed, match=message) as caught:
        driver.run(executor.execute_model)
    assert (caught.value.method, caught.value.step_id, caught.value.rank) == ("execute_model", 2, 0)


def test_a_block_that_a_reader_still_holds_is_not_given_out(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    first = driver.add(prompt(40))
    driver.run(executor.execute_model)
    driver.add([*first.prompt, 1], shares=first, hit_blocks=2)
    driver.run(executor.execute_model)
    driver.finish(first)
    driver.add(prompt(3)).blocks = [first.blocks[0]]
    with pytest.raises(WorkerFailed, match="while 1 readers holds it"):
        driver.run(executor.execute_model)


def test_appended_blocks_are_checked_too(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    row, other = driver.add(prompt(16)), driver.add(prompt(16, 1))
    driver.run(executor.execute_model)
    driver.free_blocks.insert(0, other.blocks[0])
    with pytest.raises(WorkerFailed, match="holds it"):
        driver.run(executor.execute_model, {row: 1})


def test_logprobs_of_sampled_tokens_are_the_invented_distribution(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    driver.add(prompt(20))
    asks = driver.add(prompt(20, 1), SamplingParams(logprobs=2))
    more = driver.add(prompt(40, 2), SamplingParams(logprobs=4))
    given = driver.add(prompt(20, 3), SamplingParams(logprob_token_ids=[5, 7]))
    output = driver.run(executor.execute_model, {**dict.fromkeys(driver.rows, 20), more: 10})
    assert output.logprobs is not None
    assert output.logprobs.rows.tolist() == [1, 3]
    driver.run(executor.execute_model, {more: 29})
    output = driver.run(executor.execute_model)
    lines = output.logprobs
    assert lines is not None and lines.rows.tolist() == [1, 2, 3]
    assert lines.token_ids.shape == lines.logprobs.shape == (3, 5)
    token = asks.output[-1]
    assert lines.token_ids[0, :3].tolist() == [token, token, (token + 1) % 32000]
    assert lines.logprobs[0, :3] == pytest.approx([-math.log(2), -math.log(2), -2 * math.log(2)])
    assert lines.ranks.tolist() == [1, 1, 1]
    token = given.output[-1]
    assert lines.token_ids[2, :3].tolist() == [token, 5, 7]
    assert lines.logprobs[2, 1:3] == pytest.approx(
        [-((t - token) % 32000 + 1) * math.log(2) for t in (5, 7)], rel=1e-6
    )


def test_prompt_logprobs_judge_each_next_prompt_token_once(make: MakeExecutor) -> None:
    executor, driver = make(), BatchDriver()
    row = driver.add(prompt(40), SamplingParams(prompt_logprobs=3))
    lines = []
    for count in (15, 24, 1, 1):
        lines += driver.run(executor.execute_model, {row: count}).prompt_logprobs
    expected = judge(prompt_digests(row.prompt)[:-1], int32s(row.prompt[1:]), 3, 32000)
    assert [len(line.ranks) for line in lines] == [15, 24]
    for i, name in enumerate(("token_ids", "logprobs", "ranks")):
        assert np.array_equal(np.concatenate([getattr(line, name) for line in lines]), expected[i])


def test_logprobs_of_minus_one_means_the_whole_vocabulary(make: MakeExecutor) -> None:
    executor, driver = make({"vocab_size": 50}), BatchDriver()
    driver.add([1, 2], SamplingParams(logprobs=-1))
    lines = driver.run(executor.execute_model).logprobs
    assert lines is not None and sorted(lines.token_ids[0, 1:].tolist()) == list(range(50))
    assert np.exp(lines.logprobs[0, 1:].astype(np.float64)).sum() == pytest.approx(1)


def test_a_step_takes_the_configured_time(make: MakeExecutor) -> None:
    executor = make(
        {
            "mock_step_ms": 2,
            "mock_prefill_us_per_token": 100,
            "mock_decode_us_per_seq": 10,
            "mock_jitter": 0.5,
        }
    )
    worker: Any = executor._host.worker
    waits: list[float] = []
    worker._wait_until = lambda when: waits.append(when)
    driver = BatchDriver()
    driver.add(prompt(50))
    driver.run(executor.execute_model)
    driver.add([3])
    step = driver.build({row: len(row.tokens) - row.computed for row in driver.rows})
    durations = [worker._duration_s(step) for _ in range(200)]
    assert len(waits) == 1
    assert min(durations) >= 0.5 * 2.02e-3 and max(durations) <= 1.5 * 2.02e-3
    assert max(durations) > 1.3 * min(durations)


def test_options_that_the_mock_does_not_have_are_refused() -> None:
    executor = UniProcExecutor(ExecutorConfig(worker_options={"mock_step_sm": 1}))
    with pytest.raises(WorkerStartFailed, match="mock_step_sm") as caught:
        executor.initialize()
    assert caught.value.phase == "init"


@pytest.mark.parametrize("option", [{"vocab_size": 0}, {"mock_step_ms": -1}, {"mock_jitter": 1.5}])
def test_options_that_make_no_sense_are_refused(option: dict[str, float]) -> None:
    executor = UniProcExecutor(ExecutorConfig(worker_options=option))
    with pytest.raises(WorkerStartFailed, match=next(iter(option))):
        executor.initialize()


def test_options_given_as_text_are_read(make: MakeExecutor) -> None:
    assert make({"mock_step_ms": "0.5", "vocab_size": "100"}).initialize().vocab_size == 100
