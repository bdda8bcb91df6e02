"""One message of a small head and numpy arrays, laid out so that the reader uses the arrays where they
arrived.

    word 0   kind (16 bits) | number of arrays (16 bits) | bytes of the head (32 bits)
    then     for each array: dtype code (8 bits) | dimensions (8 bits) | first dimension's length (48 bits),
             and one more word for the length of each further dimension
    then     the head, msgpack, padded to 8 bytes
    then     the arrays' bytes in C order, each padded to 8 bytes

Words are native u64. No element is boxed on either side, and nothing is executed while decoding.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from transport.errors import CodecError

if TYPE_CHECKING:
    from transport.ring import Buffer

Array = npt.NDArray[Any]

_DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(char) for char in "?bBhHiIqQefd")
_INT32 = np.dtype(np.int32)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_PADDING = tuple(bytes(n) for n in range(8))
_LENGTH_MASK = (1 << 48) - 1

_encode_head = msgspec.msgpack.Encoder().encode


def encode(kind: int, head: object, arrays: Sequence[Array] = ()) -> list[Buffer]:
    """The parts of one message, for `MessageQueue.enqueue(*parts)`. Arrays are not copied if they are
    C-contiguous.

    kind: 0 to 65535, for the reader to know how to read the head, which is anything msgspec encodes. Raises
    CodecError for a dtype that is not a number of up to 64 bits or a bool, in native byte order.
    """
    encoded = _encode_head(head)
    words = [kind | len(arrays) << 16 | len(encoded) << 32]
    bodies: list[Buffer] = []
    for array in arrays:
        try:
            code = _CODES[array.dtype]
        except KeyError:
            raise CodecError(f"an array of dtype {array.dtype} cannot be sent") from None
        shape = array.shape
        if len(shape) == 1:
            words.append(code << 56 | 1 << 48 | shape[0])
        else:
            words.append(code << 56 | len(shape) << 48 | (shape[0] if shape else 0))
            words.extend(shape[1:])
        nbytes = array.nbytes
        if nbytes:
            bodies.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
            if nbytes & 7:
                bodies.append(_PADDING[-nbytes & 7])
    try:
        front = struct.pack(f"{len(words)}Q", *words)
    except struct.error as error:
        raise CodecError(f"kind {kind} or a length does not fit: {error}") from None
    return [front + encoded + _PADDING[-len(encoded) & 7], *bodies]


def decode(view: memoryview | bytes) -> tuple[int, memoryview, list[Array]]:
    """(kind, the head's msgpack bytes, the arrays): all of them views into `view`, and read-only if it is.

    Raises CodecError if `view` is not a message that `encode` made.
    """
    view = memoryview(view)
    nbytes = view.nbytes
    try:
        words = view.cast("Q")
        first = words[0]
        count = first >> 16 & 0xFFFF
        head_bytes = first >> 32
        index = 1
        described = []
        for _ in range(count):
            word = words[index]
            ndim = word >> 48 & 0xFF
            described.append((word >> 56, ndim, word & _LENGTH_MASK, index))
            index += ndim if ndim > 1 else 1
        at = 8 * index
        head = view[at : at + head_bytes]
        at += (head_bytes + 7) & -8
        int32s = np.frombuffer(view, _INT32)
        arrays: list[Array] = []
        for code, ndim, length, where in described:
            dtype = _DTYPES[code]
            if ndim == 1 and dtype is _INT32:
                start = at >> 2
                array: Array = int32s[start : start + length]
                size = 4 * length
            else:
                shape = (length, *words[where + 1 : where + ndim]) if ndim else ()
                array = np.ndarray(shape, dtype, view, at)
                size = array.nbytes
            arrays.append(array)
            at += (size + 7) & -8
    except (IndexError, TypeError, ValueError) as error:
        raise CodecError(f"not a message of this codec: {error}") from None
    if at != nbytes:
        raise CodecError(f"not a message of this codec: {nbytes} bytes instead of {at}")
    return first & 0xFFFF, head, arrays
