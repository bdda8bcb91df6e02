"""Token ids from lists to arrays."""

from __future__ import annotations

import struct

import numpy as np

from executor.step import Int32s

_CHUNK_TOKENS = 4096
_CHUNK = struct.Struct(f"{_CHUNK_TOKENS}i")


def token_array(tokens: list[int]) -> Int32s:
    """The token ids as an array. Takes two thirds of numpy's own time for it.

    Raises OverflowError for an id that is no int32.
    """
    count = len(tokens)
    data = bytearray(4 * count)
    whole = count - count % _CHUNK_TOKENS
    try:
        for start in range(0, whole, _CHUNK_TOKENS):
            _CHUNK.pack_into(data, 4 * start, *tokens[start : start + _CHUNK_TOKENS])
        struct.pack_into(f"{count - whole}i", data, 4 * whole, *tokens[whole:] if whole else tokens)
    except struct.error as error:
        raise OverflowError(f"a token id is out of range: {error}") from None
    return np.frombuffer(data, np.int32)
