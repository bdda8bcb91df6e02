"""A model's tensors by the names that its file gives them: those of the file, or what has replaced them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .gguf_file import GGUFFile

Float32s = npt.NDArray[np.float32]


class Weights:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._replaced: dict[str, Float32s] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def num_rows(self, name: str) -> int:
        return self.file.tensors[name].shape[0]

    def tensor(self, name: str) -> Float32s:
        return self.tensor_rows(name, slice(None))

    def tensor_rows(self, name: str, rows: slice | npt.NDArray[np.integer[Any]]) -> Float32s:
        """Rows of a two-dimensional tensor, or elements of a vector."""
        replaced = self._replaced.get(name)
        return self.file.tensor_rows(name, rows) if replaced is None else replaced[rows]

    def replace(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raises ValueError, with nothing replaced, for a name or a shape that is not the file's."""
        for name, tensor in tensors.items():
            info = self.file.tensors.get(name)
            if info is None:
                raise ValueError(f"{self.file.path} has no tensor {name}")
            if tensor.shape != info.shape:
                raise ValueError(f"{name} has shape {info.shape}, its replacement {tensor.shape}")
        self._replaced |= {name: np.array(tensor, np.float32) for name, tensor in tensors.items()}
