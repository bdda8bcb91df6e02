"""Loads: traces read leniently, generated traffic, and names for blocks of prompts that nobody made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_core.kv_cache.hashing import BlockHasher
from engine_core.lab.load import (
    GeneratedLoad,
    GeneratedRequest,
    LoadError,
    at_rate,
    block_names,
    parse_lengths,
)
from engine_core.replay.traces import TraceError, TraceRequest, load_trace

VOCAB = 32000


def _load(**changes: object) -> GeneratedLoad:
    options: dict[str, object] = {
        "rate": 4.0,
        "num_requests": 2500,
        "input_lengths": parse_lengths("lognormal:300:0.8"),
        "output_lengths": parse_lengths("uniform:5:15"),
    }
    return GeneratedLoad(**{**options, **changes})  # type: ignore[arg-type]


def test_a_malformed_line_is_named_and_passed_over(tmp_path: Path) -> None:
    good = '{"timestamp": %d, "input_length": 3, "output_length": 2, "hash_ids": [1]}\n'
    path = tmp_path / "trace.jsonl"
    path.write_text(good % 0 + "{nonsense\n" + good % 5 + good % 1 + good % 9)
    bad: list[TraceError] = []
    requests = load_trace(path, on_bad_line=bad.append)
    assert [request.arrival_s for request in requests] == [0, 0.005, 0.009]
    assert [request.row for request in requests] == [0, 1, 2]
    assert [error.line for error in bad] == [2, 4]
    with pytest.raises(TraceError, match="line 2"):
        load_trace(path)


def test_equal_seeds_give_equal_loads_and_others_differ() -> None:
    assert list(_load(seed=7)) == list(_load(seed=7))
    assert list(_load(seed=7)) != list(_load(seed=8))


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    arrivals = np.array([request.arrival_s for request in _load(num_requests=20_000, burstiness=burstiness)])
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, abs=0.1 * burstiness)


def test_lengths_do_not_depend_on_the_rate() -> None:
    slow, fast = ([(r.input_length, r.output_length) for r in _load(rate=rate)] for rate in (1, 100))
    assert slow == fast


def test_lengths_follow_their_distribution() -> None:
    load = list(_load(num_requests=5000))
    inputs = np.array([request.input_length for request in load])
    outputs = np.array([request.output_length for request in load])
    assert np.median(inputs) == pytest.approx(300, rel=0.05)
    assert np.log(inputs).std() == pytest.approx(0.8, rel=0.05)
    assert (outputs.min(), outputs.max()) == (5, 15)
    assert [r.input_length for r in _load(num_requests=3, input_lengths=parse_lengths("64"))] == [64] * 3


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "uniform:5", "uniform:9:3", "zipf:3", "lognormal:a:1", "nan", "1:2", "uniform:1:inf"],
)
def test_a_distribution_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LoadError):
        parse_lengths(text)


def test_requests_of_a_group_share_the_start_of_their_prompts() -> None:
    load = _load(num_requests=40, shared_prefix_ratio=0.5, prefix_groups=2)
    first: dict[int, np.ndarray] = {}
    for request in load:
        assert isinstance(request, GeneratedRequest)
        prompt = request.prompt(VOCAB)
        assert len(prompt) == request.input_length
        other = first.setdefault(request.group, prompt)
        shared = min(request.prefix_length, len(other) // 2)
        assert np.array_equal(prompt[:shared], other[:shared])
    assert len(first) == 2


def test_a_trace_at_another_rate_keeps_its_shape() -> None:
    trace = [TraceRequest(row, float(row * row), 10, 10) for row in range(11)]
    faster = list(at_rate(trace, 1.1))
    assert [request.arrival_s for request in faster] == pytest.approx([row * row / 10 for row in range(11)])
    with pytest.raises(LoadError, match="at once"):
        at_rate(trace[:1], 1.0)


def _requests() -> list[TraceRequest]:
    rng = np.random.default_rng(5)
    mooncake = []
    for row in range(20):
        length = int(rng.integers(1, 1800))
        ids = [int(rng.integers(0, 2)) + 2 * index for index in range(-(-length // 512))]
        mooncake.append(TraceRequest(row, 0.0, length, 1, ids))
    azure = [TraceRequest(row, 0.0, 700, 1) for row in (100, 101)]
    return mooncake + azure + list(_load(num_requests=30, shared_prefix_ratio=0.6, prefix_groups=3))


@pytest.mark.parametrize("block_size", [16, 48, 512])
def test_names_of_blocks_are_equal_exactly_where_the_hashes_of_their_tokens_are(block_size: int) -> None:
    hasher = BlockHasher(block_size)
    names: dict[bytes, bytes] = {}
    hashes: dict[bytes, bytes] = {}
    for request in _requests():
        tokens = request.prompt(VOCAB)[: request.input_length // block_size * block_size]
        real = hasher.extend(hasher.start(None, None), tokens.tobytes())
        made = block_names(request, block_size)
        assert len(made) == len(real) == request.input_length // block_size
        for name, hash_ in zip(made, real, strict=True):
            assert names.setdefault(name, hash_) == hash_
            assert hashes.setdefault(hash_, name) == name
    assert len(names) > 20
