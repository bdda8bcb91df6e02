from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_core.replay.prefix import unbounded_prefix_hits
from engine_core.replay.traces import TraceError, TraceRequest, load_trace

SLICE = Path(__file__).parents[1] / "data" / "traces" / "mooncake_conversation_200.jsonl"


def _mooncake(row: int, length: int, ids: list[int]) -> TraceRequest:
    return TraceRequest(row, 0.0, length, 1, ids)


def test_reads_the_mooncake_slice() -> None:
    requests = load_trace(SLICE)
    assert len(requests) == 200
    assert (requests[0].input_length, requests[0].output_length, requests[0].arrival_s) == (6758, 500, 0.0)
    assert requests[-1].row == 199 and requests[-1].arrival_s == 72.0
    assert load_trace(SLICE, 7) == requests[:7]


def test_reads_azures_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n"
    )
    first, second = load_trace(path)
    assert first == TraceRequest(0, 0.0, 374, 44)
    assert (second.row, second.input_length, second.output_length) == (1, 396, 109)
    assert second.arrival_s == pytest.approx(4.314579)


def test_equal_hash_ids_are_equal_prefixes_and_different_ones_are_not() -> None:
    a = _mooncake(0, 1100, [3, 4, 5]).prompt(32000)
    b = _mooncake(1, 1500, [3, 4, 6]).prompt(32000)
    assert a.dtype == np.int32 and a.shape == (1100,)
    assert np.array_equal(a[:1024], b[:1024])
    assert (a[1024:] != b[1024:1100]).mean() > 0.9
    assert np.array_equal(_mooncake(9, 512, [4]).prompt(32000), a[512:1024])  # depends on the id alone
    assert a.min() >= 0 and a.max() < 32000
    assert _mooncake(0, 5, [182_789]).prompt(7).max() < 7


def test_prompts_without_hash_ids_depend_on_the_row() -> None:
    one, again, other = (TraceRequest(row, 0.0, 300, 1).prompt(1000) for row in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert one.shape == (300,) and one.min() >= 0 and one.max() < 1000


GOOD = '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("nonsense\n", "malformed"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n', "hash_ids"),
        ('{"timestamp": 0, "input_length": "3", "output_length": 1, "hash_ids": [1]}\n', "input_length"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "at least one token"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 0, "hash_ids": [1]}\n', "at least one token"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "need 2 hash_ids"),
        ('{"timestamp": -5, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n', "arrives before"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, bad: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "\n" + bad + GOOD)
    with pytest.raises(TraceError, match=reason) as caught:
        load_trace(path)
    assert caught.value.line == 3
    assert str(caught.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    "bad", ["x,1,2", "2023-11-16 18:15:46,1", "2023-11-16 18:15:46,one,2", "2023-11-16,0,2"]
)
def test_a_bad_azure_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-15 00:00:00.0,1,1\n{bad}\n")
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert caught.value.line == 3


@pytest.mark.parametrize("content", [b"", b"TIMESTAMP,ContextTokens,GeneratedTokens\n", b"\xff\xfe\x00\x81"])
def test_a_file_without_requests_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        load_trace(path)


def _hits_by_tokens(requests: list[TraceRequest], block_size: int) -> list[int]:
    """The same count from the tokens themselves: a tree of whole blocks."""
    tree: dict[tuple[int, bytes], int] = {}
    hits = []
    for request in requests:
        tokens = request.prompt(32000)
        node = cached = 0
        unbroken = True
        for start in range(0, len(tokens) // block_size * block_size, block_size):
            key = (node, tokens[start : start + block_size].tobytes())
            unbroken = unbroken and key in tree
            node = tree.setdefault(key, len(tree) + 1)
            cached += block_size if unbroken else 0
        hits.append(min(cached, (len(tokens) - 1) // block_size * block_size))
    return hits


@pytest.mark.parametrize("block_size", [16, 64])
def test_unbounded_prefix_hits_agree_with_a_count_by_tokens(block_size: int) -> None:
    requests = load_trace(SLICE, 100)
    expected = _hits_by_tokens(requests, block_size)
    assert sum(expected) > 0
    assert unbounded_prefix_hits(requests, block_size) == expected


def test_unbounded_prefix_hits_in_the_corners() -> None:
    requests = [
        _mooncake(0, 512, [1]),
        _mooncake(1, 512, [1]),  # whole prompt cached: the last token is computed again, so its block is
        _mooncake(2, 520, [1, 2]),
        _mooncake(3, 1024, [1, 2]),  # 8 tokens of id 2 are no whole block
        _mooncake(4, 600, [1, 2]),
        _mooncake(5, 600, [3, 2]),  # an id counts only behind the same prefix
        TraceRequest(6, 0.0, 100, 1),
    ]
    assert unbounded_prefix_hits(requests, 16) == [0, 496, 512, 512, 592, 0, 0]
    with pytest.raises(ValueError, match="divide"):
        unbounded_prefix_hits(requests, 24)
