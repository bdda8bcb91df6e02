"""Names for full KV blocks, so that equal prefixes find each other.

A block's name is the hash of all that its KV depends on: every token up to its end, the LoRA adapter and
the cache salt. Equal names therefore mean equal KV, and requests with different salts or adapters never
share a block.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Any, Protocol

import msgspec

from executor.step import LoRARequest


class PrefixHash(Protocol):
    """A hash of what came so far, as hashlib makes them."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


class BlockHasher:
    """Names blocks of `block_size` tokens. Has no state; any thread may use it."""

    def __init__(self, block_size: int, algo: str = "sha256") -> None:
        """`algo` is "sha256", or "xxhash" (128 bits, faster; needs the xxhash package).

        xxhash is not collision resistant, so its names depend on a secret of this process: nobody outside can
        prepare two prompts whose blocks collide.
        """
        self.block_size = block_size
        self._new: Any  # makes a PrefixHash
        fixed = os.environ.get("PYTHONHASHSEED", "").encode()
        if algo == "sha256":
            self._new, secret = hashlib.sha256, fixed
        elif algo == "xxhash":
            import xxhash

            self._new, secret = xxhash.xxh3_128, fixed or os.urandom(32)
        else:
            raise ValueError(f"unknown block hash {algo!r}; there are sha256 and xxhash")
        self._root: bytes = self._new(b"engine-core" + secret).digest()
        self._blocks = struct.Struct(f"{4 * block_size}s")

    def start(self, cache_salt: str | None, lora: LoRARequest | None) -> PrefixHash:
        """The hash before a request's first token."""
        root = self._root
        if cache_salt or lora is not None:
            extras = (cache_salt or None, (lora.name, lora.path) if lora is not None else None)
            root = self._new(root + msgspec.msgpack.encode(extras)).digest()
        prefix: PrefixHash = self._new(root)
        return prefix

    def extend(self, prefix: PrefixHash, blocks: bytes) -> list[bytes]:
        """Names of the full blocks with the int32 tokens `blocks`, which follow what `prefix` has seen."""
        update, digest = prefix.update, prefix.digest
        return [digest() for (block,) in self._blocks.iter_unpack(blocks) if update(block) is None]
