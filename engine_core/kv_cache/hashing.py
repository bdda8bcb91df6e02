"""Names for full KV blocks, so that equal prefixes find each other.

A block's hash covers its tokens and, through its parent's hash, everything before them; the first block's
parent covers what else the KV depends on (LoRA adapter, cache salt). Equal hashes therefore mean equal KV,
and requests with different salts or adapters never share a block.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from executor.step import Int32s, LoRARequest

Digest = Callable[[bytes], Any]  # a hashlib-style constructor


class BlockHasher:
    """Chained hashes of the full blocks of token sequences. Has no state; any thread may use it."""

    def __init__(self, block_size: int, algo: str = "sha256") -> None:
        """`algo` is "sha256", or "xxhash" (128 bits, three times as fast, needs the xxhash package).

        xxhash is not collision resistant, so its chain starts from a secret of this process: nobody outside
        can prepare two prompts whose blocks collide.
        """
        self.block_size = block_size
        self._digest: Digest
        if algo == "sha256":
            self._digest = hashlib.sha256
            seed = os.environ.get("PYTHONHASHSEED", "").encode()
        elif algo == "xxhash":
            import xxhash

            self._digest = xxhash.xxh3_128
            seed = os.environ.get("PYTHONHASHSEED", "").encode() or os.urandom(32)
        else:
            raise ValueError(f"unknown block hash {algo!r}; there are sha256 and xxhash")
        self._root: bytes = self._digest(b"engine-core" + seed).digest()

    def root(self, cache_salt: str | None, lora: LoRARequest | None) -> bytes:
        """The parent of a request's first block."""
        if not cache_salt and lora is None:
            return self._root
        extras = (cache_salt or None, (lora.name, lora.path) if lora is not None else None)
        digest: bytes = self._digest(self._root + msgspec.msgpack.encode(extras)).digest()
        return digest

    def chain(self, parent: bytes, tokens: Int32s | bytes) -> list[bytes]:
        """Hashes of the full blocks in `tokens` (int32, or its bytes), which follow the block named
        `parent`.
        """
        data = tokens if isinstance(tokens, bytes) else tokens.tobytes()
        width = 4 * self.block_size
        digest = self._digest
        hashes: list[bytes] = []
        append = hashes.append
        for start in range(0, len(data) - width + 1, width):
            parent = digest(parent + data[start : start + width]).digest()
            append(parent)
        return hashes

    def one(self, parent: bytes, block: bytes) -> bytes:
        """Hash of the block with the int32 tokens `block`."""
        digest: bytes = self._digest(parent + block).digest()
        return digest
