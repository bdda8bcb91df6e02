"""The sampler keeps vLLM's rules, and a request's tokens depend on nothing but itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor.batch_state import BatchState
from executor.sampling import Sampler
from executor.sampling_params import SamplingParams
from executor.step import EMPTY, ModelRunnerOutput, NewRequest, SchedulerOutput

SLOTS, MAX_LEN = 64, 64


class Bench:
    """A sampler over a batch of requests that decode one token a step."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.vocab = vocab
        self.sampler = Sampler(vocab, SLOTS, seed)
        self.batch = BatchState(SLOTS, MAX_LEN, 16)
        self.step_id = 0
        self.known: dict[int, int] = {}

    def step(
        self,
        logits: np.ndarray,
        slots: list[int],
        new: dict[int, tuple[list[int], list[int], SamplingParams, str]] | None = None,
        finished: list[int] | None = None,
    ) -> ModelRunnerOutput:
        """One step in which every slot samples; `new`: slot -> prompt, outputs so far, params, request id."""
        requests = []
        for slot, (prompt, outputs, params, name) in (new or {}).items():
            tokens = np.array(prompt + outputs, np.int32)
            blocks = np.arange(1, 5, dtype=np.int32)
            requests.append(NewRequest(slot, name, tokens, len(prompt), len(tokens) - 1, blocks, params))
            self.known[slot] = len(tokens)
        computed = np.array([self.known[s] - 1 for s in slots], np.int32)
        step = SchedulerOutput(
            self.step_id,
            np.array(slots, np.int32),
            np.ones(len(slots), np.int32),
            computed,
            new_requests=requests,
            finished_slots=np.array(finished, np.int32) if finished else EMPTY,
        )
        self.step_id += 1
        self.batch.apply(step)
        output = self.sampler.sample(logits.astype(np.float32).copy(), step, self.batch)
        self.batch.record(step, output)
        for s in slots:
            self.known[s] += 1
        return output


def one(
    logits: Any, prompt: list[int] | None = None, outputs: list[int] | None = None, **params: Any
) -> ModelRunnerOutput:
    logits = np.asarray(logits, np.float32)[None]
    bench = Bench(logits.shape[1])
    return bench.step(logits, [0], {0: (prompt or [0], outputs or [], SamplingParams(**params), "r")})


def token(*args: Any, **kwargs: Any) -> int:
    return int(one(*args, **kwargs).sampled_token_ids[0, 0])


def draws(logits: Any, n: int, **params: Any) -> np.ndarray:
    """`n` tokens of requests that differ in their seed alone."""
    logits = np.asarray(logits, np.float32)
    found = []
    for start in range(0, n, SLOTS):
        bench = Bench(len(logits))
        slots = list(range(min(SLOTS, n - start)))
        new = {s: ([0], [], SamplingParams(seed=start + s, **params), f"{s}") for s in slots}
        found.append(bench.step(np.tile(logits, (len(slots), 1)), slots, new).sampled_token_ids[:, 0])
    return np.concatenate(found)


def assert_distribution(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square at a bound that the fixed seeds pass and a wrong sampler does not."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    degrees = int(likely.sum()) - 1
    wanted = expected[likely] * len(tokens)
    chi2 = float(((counts[likely] - wanted) ** 2 / wanted).sum())
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees) + 6


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


LOGITS = np.array([0.1, 2.0, -1.0, 1.5, 0.0, -0.5, 1.9, -3.0])


def test_temperature_zero_takes_the_largest_and_the_lower_id_among_equals() -> None:
    assert token([0.0, 3.0, 1.0, 3.0], temperature=0) == 1
    assert token([0.0, 3.0, 1.0, 3.0], temperature=9e-6) == 1


def test_plain_sampling_follows_the_softmax() -> None:
    assert_distribution(draws(LOGITS, 4096), softmax(LOGITS))


def test_temperature_divides_the_logits() -> None:
    assert_distribution(draws(LOGITS, 4096, temperature=0.5), softmax(LOGITS / 0.5))
    assert_distribution(draws(LOGITS, 4096, temperature=1.7), softmax(LOGITS / 1.7))


def test_top_k_keeps_the_k_most_likely_and_their_equals() -> None:
    expected = np.where(LOGITS >= 1.5, softmax(LOGITS), 0)
    assert_distribution(draws(LOGITS, 4096, top_k=3), expected / expected.sum())
    tied = np.array([1.0, 0.0, 1.0, 1.0, -2.0])
    assert set(draws(tied, 512, top_k=2)) == {0, 2, 3}


@pytest.mark.parametrize("off", [0, -1, 8, 100])
def test_top_k_off(off: int) -> None:
    assert_distribution(draws(LOGITS, 2048, top_k=off), softmax(LOGITS))


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(p)
    for top_p, kept in ((0.3, 1), (0.41, 2), (0.69, 2), (0.75, 3), (0.95, 4)):
        expected = np.where(np.arange(4) < kept, p, 0)
        assert_distribution(draws(logits, 2048, top_p=top_p), expected / expected.sum())


def test_top_p_of_a_flat_distribution_keeps_its_share() -> None:
    found = draws(np.zeros(5000), 2048, top_p=0.5)
    assert set(found) <= set(range(2501)) and len(set(found)) > 1200


def test_top_p_counts_within_top_k() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    # Of the first two, 0.4 / 0.7 = 0.57 is not enough for 0.6, but is for 0.55.
    assert set(draws(np.log(p), 512, top_k=2, top_p=0.6)) == {0, 1}
    assert set(draws(np.log(p), 512, top_k=2, top_p=0.55)) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    expected = np.array([0.5, 0.3, 0, 0])
    assert_distribution(draws(np.log(p), 2048, min_p=0.4), expected / expected.sum())
    assert_distribution(draws(np.log(p), 2048, min_p=0.4, top_k=3), expected / expected.sum())
    assert set(draws(np.log(p), 512, min_p=0.2, top_p=0.9)) == {0, 1, 2}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    assert token([2.0, 1.9, 0.0], prompt=[0], temperature=0, repetition_penalty=1.1) == 1
    assert token([2.0, 1.9, 0.0], prompt=[2], outputs=[0], temperature=0, repetition_penalty=1.1) == 1
    assert token([-1.0, -1.05, -9.0], prompt=[0, 0], temperature=0, repetition_penalty=1.2) == 1
    assert token([2.0, 1.9, 0.0], prompt=[2], temperature=0, repetition_penalty=1.1) == 0


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    assert token([2.0, 1.9, 0.0], prompt=[0, 0], temperature=0, presence_penalty=1, frequency_penalty=1) == 0
    assert token([2.0, 1.9, 0.0], outputs=[0], temperature=0, presence_penalty=0.2) == 1
    assert token([2.0, 1.0, 0.0], outputs=[0], temperature=0, frequency_penalty=0.4) == 0
    assert token([2.0, 1.0, 0.0], outputs=[0, 0, 0], temperature=0, frequency_penalty=0.4) == 1


def test_penalties_follow_the_output_step_by_step() -> None:
    bench = Bench(3)
    params = SamplingParams(temperature=0, frequency_penalty=0.3)
    logits = np.array([[2.0, 1.5, 1.0]])
    found = [
        int(bench.step(logits, [5], {5: ([0], [], params, "r")} if i == 0 else None).sampled_token_ids[0, 0])
        for i in range(6)
    ]
    # Of 0 and 1 there remain 2.0 1.5, 1.7 1.5, 1.4 1.5, 1.4 1.2, 1.1 1.2, 1.1 0.9.
    assert found == [0, 0, 1, 0, 1, 0]


def test_a_resumed_request_keeps_its_penalties() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.4)
    bench = Bench(3)
    bench.step(np.array([[2.0, 1.0, 0.0]]), [0], {0: ([1], [0, 0], params, "old")})
    out = bench.step(np.array([[2.0, 1.0, 0.0]]), [0], {0: ([1], [0], params, "new")}, finished=[0])
    assert out.sampled_token_ids[0, 0] == 0


def test_logit_bias_allowed_tokens_and_ids_beyond_the_vocabulary() -> None:
    assert token([2.0, 1.0, 0.0], temperature=0, logit_bias={1: 1.5, 7: 100.0, -1: 100.0}) == 1
    assert token([2.0, 1.0, 0.0], temperature=0, allowed_token_ids=[2, 1, 99]) == 1
    assert token([2.0, 1.0, 0.0], temperature=0, allowed_token_ids=[2], logit_bias={0: 100.0}) == 2
    assert set(draws([2.0, 1.0, 0.0], 256, allowed_token_ids=[1, 2])) == {1, 2}


def test_min_tokens_masks_the_stop_ids_until_enough_are_out() -> None:
    stops: dict[str, Any] = {"temperature": 0, "all_stop_token_ids": [0], "min_tokens": 2}
    assert token([2.0, 1.0, 0.0], **stops) == 1
    assert token([2.0, 1.0, 0.0], outputs=[1], **stops) == 1
    assert token([2.0, 1.0, 0.0], outputs=[1, 1], **stops) == 0
    assert token([2.0, 1.0, 0.0], allowed_token_ids=[0], **stops) == 0  # nothing else may come


def test_bad_words_are_not_completed() -> None:
    assert token([2.0, 1.0, 0.0], temperature=0, bad_words_token_ids=[[0]]) == 1
    words: dict[str, Any] = {"temperature": 0, "bad_words_token_ids": [[1, 2, 0]]}
    assert token([2.0, 1.0, 0.0], outputs=[1, 2], **words) == 1
    assert token([2.0, 1.0, 0.0], outputs=[2, 1], **words) == 0
    assert token([2.0, 1.0, 0.0], prompt=[1, 2], **words) == 0  # the prompt does not count
    assert token([2.0, 1.0, 0.0], prompt=[1], outputs=[2], **words) == 0


def test_logprobs_are_of_the_raw_logits_in_the_layout_of_the_step() -> None:
    logits = np.array([1.0, 3.0, 2.0, 0.0])
    out = one(logits, temperature=0, logprobs=2, logit_bias={3: 10.0}, repetition_penalty=2.0)
    lines = out.logprobs
    assert lines is not None
    wanted = np.log(softmax(logits))
    assert lines.token_ids.tolist() == [[3, 1, 2]] and lines.token_ids.dtype == np.int32
    np.testing.assert_allclose(lines.logprobs, wanted[[[3, 1, 2]]], atol=1e-6)
    assert lines.ranks.tolist() == [4] and lines.rows.tolist() == [0]


def test_logprobs_of_all_of_some_ids_and_of_none() -> None:
    logits = np.array([1.0, 3.0, 2.0, 3.0])
    full = one(logits, temperature=0, logprobs=-1).logprobs
    assert full is not None and full.token_ids.tolist() == [[1, 1, 3, 2, 0]]
    assert full.ranks.tolist() == [2]  # equals count, as in vLLM
    none = one(logits, temperature=0, logprobs=0).logprobs
    assert none is not None and none.token_ids.tolist() == [[1]]
    some = one(logits, temperature=0, logprob_token_ids=[2, 0]).logprobs
    assert some is not None and some.token_ids.tolist() == [[1, 2, 0]]
    assert one(logits, temperature=0).logprobs is None


def test_logprobs_of_rows_that_ask_for_different_numbers() -> None:
    bench = Bench(6)
    ask: list[dict[str, Any]] = [{"logprobs": 1}, {}, {"logprobs": 3}, {"logprob_token_ids": [5]}]
    new = {i: ([0], [], SamplingParams(temperature=0, **a), f"r{i}") for i, a in enumerate(ask)}
    logits = np.tile(np.arange(6.0), (4, 1))
    lines = bench.step(logits, [2, 1, 0, 3], new).logprobs
    assert lines is not None
    assert lines.rows.tolist() == [0, 2, 3]
    assert lines.token_ids.tolist() == [[5, 5, 4, 3], [5, 5, 4, 3], [5, 5, 0, 0]]
    assert np.isneginf(lines.logprobs[2, 2:]).all() and np.isfinite(lines.logprobs[:2]).all()


def test_rows_that_do_not_sample_have_no_token() -> None:
    sampler, batch = Sampler(5, SLOTS), BatchState(SLOTS, MAX_LEN, 16)
    params = SamplingParams(temperature=0, logprobs=1)
    new = [
        NewRequest(s, f"r{s}", np.arange(n, dtype=np.int32) % 5, n, 0, np.array([1], np.int32), params)
        for s, n in ((3, 8), (1, 2))
    ]
    step = SchedulerOutput(
        7, np.array([3, 1], np.int32), np.array([4, 2], np.int32), np.zeros(2, np.int32), new
    )
    batch.apply(step)
    out = sampler.sample(np.array([[0, 0, 9, 0, 0]], np.float32), step, batch)
    assert out.step_id == 7 and out.num_sampled.tolist() == [0, 1] and out.sampled_token_ids[1, 0] == 2
    assert out.logprobs is not None and out.logprobs.rows.tolist() == [1]


def test_logits_of_the_wrong_shape_are_refused() -> None:
    bench = Bench(4)
    with pytest.raises(ValueError, match=r"not float32 \(1, 4\)"):
        bench.step(np.zeros((2, 4)), [0], {0: ([0], [], SamplingParams(), "r")})


@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_prompt_logprobs_of_chunks_make_up_the_whole_prompt(chunk: int) -> None:
    vocab, length = 7, 13
    rng = np.random.default_rng(1)
    table = rng.normal(size=(length, vocab)).astype(np.float32)
    prompt = rng.integers(0, vocab, length).astype(np.int32)
    sampler, batch = Sampler(vocab, SLOTS), BatchState(SLOTS, MAX_LEN, 16)
    got: list[Any] = []
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    done = 0
    while done < length:
        count = min(chunk, length - done)
        # A decoding request before it, so that its flat tokens do not begin at 0.
        new = [NewRequest(4, "p", prompt, length, 0, np.array([1], np.int32), params)] if done == 0 else []
        other = NewRequest(9, "d", prompt[:2], 2, 1, np.array([2], np.int32), SamplingParams(temperature=0))
        new += [other] if done == 0 else []
        step = SchedulerOutput(
            done,
            np.array([9, 4], np.int32),
            np.array([1, count], np.int32),
            np.array([int(batch.num_computed_tokens[9]) if done else 1, done], np.int32),
            new,
        )
        batch.apply(step)
        flat = np.concatenate([np.zeros((1, vocab), np.float32), table[done : done + count]])
        sampling = flat[batch.query_start_loc(step)[1:] - 1][batch.samples(step)]
        out = sampler.sample(sampling, step, batch)
        for span in sampler.prompt_spans(step, batch):
            got.append(sampler.prompt_logprobs(span, lambda tokens, flat=flat: flat[tokens]))
            assert got[-1].row == 1
        batch.record(step, out)
        done += count
    ids = np.concatenate([g.token_ids for g in got])
    values = np.concatenate([g.logprobs for g in got])
    ranks = np.concatenate([g.ranks for g in got])
    wanted = table[:-1] - np.log(np.exp(table[:-1]).sum(1, keepdims=True))
    assert ids[:, 0].tolist() == prompt[1:].tolist() and ids.shape == (length - 1, 3)
    np.testing.assert_allclose(values[:, 0], wanted[np.arange(length - 1), prompt[1:]], atol=1e-6)
    np.testing.assert_allclose(values[:, 1], wanted.max(1), atol=1e-6)
    assert (ids[:, 1:] == np.argsort(-wanted, 1)[:, :2]).all()
    assert (ranks == (wanted >= values[:, :1] - 1e-6).sum(1)).all()


def any_params() -> st.SearchStrategy[SamplingParams]:
    tokens = st.integers(0, 39)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 5, 39, 40]),
        top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
        presence_penalty=st.sampled_from([0.0, 1.0, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        seed=st.one_of(st.none(), st.integers(-(2**70), 2**70)),
        logit_bias=st.one_of(st.none(), st.dictionaries(tokens, st.floats(-100, 100), max_size=3)),
        allowed_token_ids=st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=5)),
        bad_words_token_ids=st.one_of(
            st.none(), st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=3)
        ),
        min_tokens=st.sampled_from([0, 3]),
        all_stop_token_ids=st.lists(tokens, max_size=2),
        logprobs=st.sampled_from([None, 0, 3, -1]),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(any_params(), min_size=2, max_size=6), st.integers(0, 2**32), st.booleans())
@example(
    [SamplingParams(allowed_token_ids=[1], bad_words_token_ids=[[1]], temperature=t) for t in (0.0, 1.0)],
    0,
    False,
)
def test_a_request_samples_the_same_alone_and_in_any_batch(
    params: list[SamplingParams], seed: int, coarse: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(5, len(params), 40))
    if coarse:
        logits = np.round(logits)  # equal logits
    prompts = [rng.integers(0, 40, 3).tolist() for _ in params]
    together = Bench(40, seed=3)
    slots = rng.permutation(SLOTS)[: len(params)].tolist()
    new = {s: (prompts[i], [], params[i], f"r{i}") for i, s in enumerate(slots)}
    batched = np.array(
        [together.step(logits[t], slots, new if t == 0 else None).sampled_token_ids[:, 0] for t in range(5)]
    )
    for i, p in enumerate(params):
        alone = Bench(40, seed=3)
        found = []
        for t in range(5):
            new = {0: (prompts[i], [], p, f"r{i}")} if t == 0 else None  # type: ignore[assignment]
            found.append(int(alone.step(logits[t, i : i + 1], [0], new).sampled_token_ids[0, 0]))
        assert found == batched[:, i].tolist()
        # Preempted after three tokens and resumed in another slot.
        resumed = Bench(40, seed=3)
        again = {7: (prompts[i], found[:3], p, f"r{i}")}
        assert int(resumed.step(logits[3, i : i + 1], [7], again).sampled_token_ids[0, 0]) == found[3]
        if p.allowed_token_ids is not None:
            assert set(found) <= set(p.allowed_token_ids)


def test_seeds_decide_and_differ() -> None:
    def run(vocab: int = 1000, **kwargs: Any) -> list[int]:
        bench = Bench(vocab, seed=kwargs.pop("engine", 0))
        name = kwargs.pop("name", "r")
        params = SamplingParams(**kwargs)
        logits = np.zeros((1, vocab))
        return [
            int(
                bench.step(logits, [0], {0: ([0], [], params, name)} if t == 0 else None).sampled_token_ids[
                    0, 0
                ]
            )
            for t in range(8)
        ]

    assert run(seed=1) == run(seed=1, name="other", engine=9)
    assert run(seed=1) != run(seed=2)
    assert run(seed=1) != run(seed=-1)
    assert run() == run()
    assert run() != run(name="other")
    assert run() != run(engine=1)
    assert len(set(run(seed=1))) > 4


def test_lines_without_a_possible_token_do_not_fail() -> None:
    for params in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}, {"temperature": 0}):
        assert 0 <= token(np.full(8, -np.inf), **params) < 8
