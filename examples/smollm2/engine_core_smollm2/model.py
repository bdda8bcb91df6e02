"""The Llama transformer in numpy, float32, or one tensor-parallel rank's share of it.

A rank holds some of the heads, of the feed-forward columns and of the vocabulary. Its attention and
feed-forward outputs are partial sums, which `Collective.all_reduce` completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .attention import AttentionJob, attend
from .gguf_file import GGUFError, GGUFFile, LlamaConfig
from .linear import Linear, Threads
from .weights import Weights

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


class AllReduce(Protocol):
    """Sums an array over the ranks, in place."""

    def __call__(self, array: Float32s) -> None: ...


class Tokens(NamedTuple):
    """A step's tokens, flat over its rows."""

    ids: Int32s  # (n,)
    positions: Int32s  # (n,)
    kv_slots: npt.NDArray[np.int64]  # (n,) block id * block size + offset: where their keys and values go
    jobs: list[AttentionJob]


class Layer:
    """One transformer layer's weights: this rank's share of them."""

    def __init__(
        self, weights: Weights, index: int, config: LlamaConfig, rank: int, world_size: int
    ) -> None:
        def weight(name: str) -> Float32s:
            return weights.tensor(f"blk.{index}.{name}.weight")

        def rows(name: str) -> Float32s:
            full = f"blk.{index}.{name}.weight"
            share = weights.num_rows(full) // world_size
            return weights.tensor_rows(full, slice(rank * share, (rank + 1) * share))

        def columns(name: str) -> Float32s:
            return np.split(weight(name), world_size, axis=1)[rank]

        self.attention_norm = weight("attn_norm")
        self.qkv = Linear(
            np.concatenate(
                [
                    halves_from_pairs(rows("attn_q"), config.head_dim) * np.float32(config.head_dim**-0.5),
                    halves_from_pairs(rows("attn_k"), config.head_dim),
                    rows("attn_v"),
                ]
            )
        )
        self.attention_out = Linear(columns("attn_output"))
        self.mlp_norm = weight("ffn_norm")
        self.gate_up = Linear(np.concatenate([rows("ffn_gate"), rows("ffn_up")]))
        self.down = Linear(columns("ffn_down"))


class Llama:
    """The model, or rank `rank` of `world_size` shares. Raises `GGUFError` if it cannot be split so."""

    def __init__(self, file: GGUFFile, rank: int = 0, world_size: int = 1) -> None:
        self.config = config = LlamaConfig.from_gguf(file)
        self.weights = Weights(file)
        self._rank, self._world_size = rank, world_size
        for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
            if getattr(config, name) % world_size:
                raise GGUFError(
                    file.path, f"has {name} {getattr(config, name)}, not divisible by {world_size} ranks"
                )
        self.num_heads = config.num_heads // world_size
        self.num_kv_heads = config.num_kv_heads // world_size
        frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        if "rope_freqs.weight" in file.tensors:
            frequencies /= file.tensor("rope_freqs.weight")
        self._frequencies = frequencies / config.rope_scale
        self.load()

    def load(self) -> None:
        """Take this rank's share of the weights into memory."""
        self.layers = [self._layer(index) for index in range(self.config.num_layers)]
        self.norm = self.weights.tensor("output_norm.weight")
        self.lm_head = self._lm_head()

    def unload(self) -> None:
        """Let go of what `load` took."""
        self.layers = []
        self.lm_head = Linear(np.empty((0, self.config.hidden_size), np.float32))

    def replace(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take whole tensors, by the file's names, in place of what was there.

        Raises ValueError, with nothing replaced, for a name or a shape that is not the file's.
        """
        self.weights.replace(tensors)
        for index in {int(name.split(".")[1]) for name in tensors if name.startswith("blk.")}:
            self.layers[index] = self._layer(index)
        self.norm = self.weights.tensor("output_norm.weight")
        if self._projection in tensors:
            self.lm_head = self._lm_head()

    def _layer(self, index: int) -> Layer:
        return Layer(self.weights, index, self.config, self._rank, self._world_size)

    @property
    def _projection(self) -> str:
        return "output.weight" if "output.weight" in self.weights else "token_embd.weight"

    def _lm_head(self) -> Linear:
        share = self.config.vocab_size // self._world_size
        rows = slice(self._rank * share, (self._rank + 1) * share)
        return Linear(self.weights.tensor_rows(self._projection, rows))

    def embed(self, token_ids: Int32s) -> Float32s:
        """(n,) -> (n, hidden_size)"""
        return self.weights.tensor_rows("token_embd.weight", token_ids)

    def forward(
        self, tokens: Tokens, cache: list[Float32s], threads: Threads, all_reduce: AllReduce | None = None
    ) -> Float32s:
        """Run the layers, writing the tokens' keys and values to `cache` (one array a layer).

        Returns the hidden states after the last norm, (n, hidden_size).
        """
        config, n = self.config, len(tokens.ids)
        heads, head_dim = self.num_heads, config.head_dim
        angles = tokens.positions[:, None] * self._frequencies
        cos = np.cos(angles).astype(np.float32)[:, None]
        sin = np.sin(angles).astype(np.float32)[:, None]
        x = self.embed(tokens.ids)
        attended = np.empty((n, heads, head_dim), np.float32)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            normed = rms_norm(x, layer.attention_norm, config.norm_epsilon)
            qkv = layer.qkv(normed, threads).reshape(n, -1, head_dim)
            rotate(qkv[:, : heads + self.num_kv_heads], cos, sin)
            # All are written before any is read: a row may attend to a prefix that another row of this very
            # step computes.
            layer_cache.reshape(-1, qkv[0, heads:].size)[tokens.kv_slots] = qkv[:, heads:].reshape(n, -1)
            query = qkv[:, :heads]
            threads.each(partial(attend, query=query, cache=layer_cache, out=attended), tokens.jobs)
            delta = layer.attention_out(attended.reshape(n, -1), threads)
            if all_reduce is not None:
                all_reduce(delta)
            x += delta
            normed = rms_norm(x, layer.mlp_norm, config.norm_epsilon)
            gate, up = np.split(layer.gate_up(normed, threads), 2, axis=1)
            delta = layer.down(silu(gate) * up, threads)
            if all_reduce is not None:
                all_reduce(delta)
            x += delta
        return rms_norm(x, self.norm, config.norm_epsilon)

    def logits(self, hidden: Float32s, threads: Threads) -> Float32s:
        """(n, hidden_size) -> this rank's columns of the logits, (n, vocab_size / world_size)"""
        return self.lm_head(hidden, threads)


def halves_from_pairs(weight: Float32s, head_dim: int) -> Float32s:
    """Reorder the rows of a query or key matrix (heads * head_dim, in_features).

    GGUF files hold rotated dimensions in pairs (0, 1), (2, 3), ...; here dimension i turns with i + head_dim
    / 2.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def rotate(x: Float32s, cos: Float32s, sin: Float32s) -> Float32s:
    """RoPE in place. `x` (n, heads, head_dim); `cos`, `sin` (n, 1, head_dim / 2)"""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = first * cos
    turned -= second * sin
    second *= cos
    second += first * sin
    first[...] = turned
    return x


def rms_norm(x: Float32s, weight: Float32s, epsilon: float) -> Float32s:
    scale = np.einsum("ij,ij->i", x, x)
    scale /= x.shape[1]
    scale += epsilon
    np.sqrt(scale, out=scale)
    normed: Float32s = x / scale[:, None]
    normed *= weight
    return normed


def silu(x: Float32s) -> Float32s:
    """x * sigmoid(x)"""
    divisor = np.exp(-x)
    divisor += 1
    result: Float32s = np.divide(x, divisor, out=divisor)
    return result
