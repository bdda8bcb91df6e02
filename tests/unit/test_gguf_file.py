"""GGUF files that are damaged, or of a kind that cannot be run, are refused with a reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.smollm2 import needs_model

pytestmark = needs_model


def write_model(path: Path, **metadata: Any) -> Path:
    """A tiny Llama with random weights of several types, its own output matrix and biases of nothing."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **metadata,
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.words", ["a", "bc"])
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: Any = None) -> None:
        weight = rng.normal(size=shape).astype(np.float32) * 0.1
        if kind is None:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    q8, f16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16
    add("token_embd.weight", 50, 64, kind=q8)
    add("output.weight", 50, 64)
    add("output_norm.weight", 64)
    for i in range(2):
        add(f"blk.{i}.attn_norm.weight", 64)
        add(f"blk.{i}.attn_q.weight", 64, 64, kind=q8)
        add(f"blk.{i}.attn_k.weight", 32, 64, kind=f16)
        add(f"blk.{i}.attn_v.weight", 32, 64)
        add(f"blk.{i}.attn_output.weight", 64, 64, kind=q8)
        add(f"blk.{i}.ffn_norm.weight", 64)
        add(f"blk.{i}.ffn_gate.weight", 96, 64)
        add(f"blk.{i}.ffn_up.weight", 96, 64, kind=f16)
        add(f"blk.{i}.ffn_down.weight", 64, 96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_and_tensors_are_read_as_the_gguf_package_reads_them(tmp_path: Path) -> None:
    import gguf
    from engine_core_smollm2.gguf_file import GGUFFile

    path = write_model(tmp_path / "tiny.gguf")
    file = GGUFFile(path)
    theirs = gguf.GGUFReader(path)
    for key, value in file.metadata.items():
        assert theirs.fields[key].contents() == value
    assert file.metadata["test.words"] == ["a", "bc"] and file.metadata["test.numbers"] == [1, 2, 3]
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.tensor(tensor.name), expected)
    rows = np.array([3, 0, 49, 3], np.int32)
    np.testing.assert_array_equal(
        file.tensor_rows("token_embd.weight", rows), file.tensor("token_embd.weight")[rows]
    )


def naive_logits(file: Any, token_ids: list[int]) -> np.ndarray:
    """The model in a few lines of float64, position by position, pairs rotated as the file has them."""
    w = {name: file.tensor(name).astype(float) for name in file.tensors}
    x = w["token_embd.weight"][token_ids]
    n, heads, kv_heads, dim = len(token_ids), 4, 2, 16

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rope(x: np.ndarray) -> np.ndarray:
        angle = np.arange(n)[:, None, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
        a, b = x[..., ::2], x[..., 1::2]
        turned = np.stack([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)
        return turned.reshape(x.shape)

    for i in range(2):
        layer = {name.split(".")[2]: value for name, value in w.items() if name.startswith(f"blk.{i}.")}
        h = norm(x, layer["attn_norm"])
        q = rope((h @ layer["attn_q"].T).reshape(n, heads, dim))
        k = rope((h @ layer["attn_k"].T).reshape(n, kv_heads, dim)).repeat(2, axis=1)
        v = (h @ layer["attn_v"].T).reshape(n, kv_heads, dim).repeat(2, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / 4 + np.triu(np.full((n, n), -np.inf), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ layer["attn_output"].T
        h = norm(x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return norm(x, w["output_norm.weight"]) @ w["output.weight"].T


def test_another_llama_computes_what_a_naive_one_does(tmp_path: Path) -> None:
    """Untied output, mixed types, a vocabulary that is no multiple of a tile, blocks out of order."""
    from engine_core_smollm2.attention import plan_attention
    from engine_core_smollm2.gguf_file import open_model
    from engine_core_smollm2.linear import Threads
    from engine_core_smollm2.model import Llama, Tokens

    from executor.batch_state import BatchState
    from executor.sampling_params import SamplingParams
    from executor.step import NewRequest, SchedulerOutput

    write_model(tmp_path / "tiny.gguf")
    file = open_model(str(tmp_path))  # a directory with one file
    model, threads = Llama(file), Threads(1)
    token_ids = np.random.default_rng(1).integers(0, 50, 21).astype(np.int32)
    expected = naive_logits(file, token_ids.tolist())
    cache = [np.zeros((16, 4, 2, 2, 16), np.float32) for _ in range(2)]
    batch = BatchState(4, 128, 4)
    found, done = [], 0
    for count in (9, 1, 1, 10):
        new = []
        if not done:
            blocks = np.array([5, 9, 2, 7, 11, 3], np.int32)
            new = [NewRequest(2, "r", token_ids, 21, 0, blocks, SamplingParams())]
        step = SchedulerOutput(
            done, np.array([2], np.int32), np.array([count], np.int32), np.array([done], np.int32), new
        )
        batch.apply(step)
        plan = plan_attention(step, batch)
        tokens = Tokens(batch.input_ids(step), batch.positions(step), batch.slot_mapping(step), plan)
        found.append(model.logits(model.forward(tokens, cache, threads), threads))
        batch.num_computed_tokens[2] = done = done + count
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "scales RoPE by 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "only a part of each head"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    from engine_core_smollm2.gguf_file import GGUFError, GGUFFile, LlamaConfig

    file = GGUFFile(write_model(tmp_path / "tiny.gguf", **metadata))
    with pytest.raises(GGUFError, match=reason) as caught:
        LlamaConfig.from_gguf(file)
    assert str(file.path) in str(caught.value)


def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path: Path) -> None:
    from engine_core_smollm2.gguf_file import GGUFError, GGUFFile
    from engine_core_smollm2.model import Llama

    file = GGUFFile(write_model(tmp_path / "tiny.gguf"))
    with pytest.raises(GGUFError, match="num_heads 4, not divisible by 3 ranks"):
        Llama(file, 0, 3)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    from engine_core_smollm2.gguf_file import GGUFError, GGUFFile, open_model

    with pytest.raises(GGUFError, match="cannot be read"):
        open_model(str(tmp_path / "absent.gguf"))
    with pytest.raises(GGUFError, match=r"holds 0 \.gguf files"):
        open_model(str(tmp_path))
    data = write_model(tmp_path / "tiny.gguf").read_bytes()
    for name, content in {
        "text": b"this is no GGUF file, but it is longer than the header of one",
        "short": data[:10],
        "cut": data[:300],
        "version": data[:4] + b"\x09" + data[5:],
        "length": data[:24] + b"\xff" * 8 + data[32:],
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(GGUFError, match=str(path)):
            GGUFFile(path)
    shutil.rmtree(tmp_path)
