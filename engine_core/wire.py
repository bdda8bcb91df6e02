"""Frames to structs and back: MessagePack with arrays beside it.

A message is a list of frames. Frame 0 is MessagePack; an ndarray in it is `[dtype, shape, data]`, where data
is either the raw C-order bytes (extension type 3) or the number of the frame that holds them. Pickle
(extension types 1 and 2) is never decoded. Claimed sizes are checked against the bytes that really came
before anything is built from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_origin

import msgspec
import numpy as np

from engine_core.errors import ProtocolError
from engine_core.protocol import Array, Tensor

Frame = bytes | memoryview
T = TypeVar("T")

RAW_EXT = 3
PEEK_BYTES = 0x10000 + 8  # an array's head, and the longest string whose length has two bytes
INLINE_BYTES = 256  # smaller arrays travel inside frame 0, as vLLM does it by default

_TORCH_TO_NUMPY = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
}
_NUMPY_TO_TORCH = {descriptor: name for name, descriptor in _TORCH_TO_NUMPY.items()}
_NUMERIC_DESCRIPTOR = re.compile(r"[<>|=]?[biuf][1248]")


class WireEncoder:
    """Structs to frames. Not for use by two threads at once."""

    def __init__(self, inline_bytes: int = INLINE_BYTES) -> None:
        """Arrays of `inline_bytes` or more get frames of their own; receivers take either."""
        self._inline_bytes = inline_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._frames: list[Frame] = []

    def encode(self, message: Any) -> list[Frame]:
        """Frame 0, then one frame for each large array."""
        frames: list[Frame] = [b""]
        frames[0] = self.encode_part(message, frames)
        return frames

    def encode_part(self, part: Any, frames: list[Frame]) -> bytes:
        """MessagePack of a piece of frame 0; its large arrays are appended to `frames`.

        `frames[0]` stands for the frame 0 that the caller puts together.
        """
        self._frames = frames
        return self._encoder.encode(part)

    def _encode_array(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            array = value.array
            dtype = _NUMPY_TO_TORCH.get(array.dtype.str)
            if dtype is None:
                raise TypeError(f"torch has no name for dtype {array.dtype.str}")
        elif isinstance(value, np.ndarray):
            array, dtype = value, value.dtype.str
        elif isinstance(value, np.generic):
            return value.item()
        else:
            raise TypeError(f"{type(value).__name__} objects do not travel over the socket")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"arrays of dtype {array.dtype} do not travel over the socket")
        data = np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
        if array.ndim == 0 or array.nbytes < self._inline_bytes:
            return dtype, array.shape, msgspec.msgpack.Ext(RAW_EXT, data)
        self._frames.append(data)
        return dtype, array.shape, len(self._frames) - 1


class WireDecoder(Generic[T]):
    """Frames to one type of struct. Not for use by two threads at once.

    Arrays of the result are read-only views of the frames.
    """

    def __init__(self, type_: type[T]) -> None:
        self._type = type_
        self._decoder = msgspec.msgpack.Decoder(type_, dec_hook=self._decode_array, ext_hook=_raw_bytes)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Raises `ProtocolError` that names the field and the value at fault."""
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except msgspec.ValidationError as error:
            raise ProtocolError(_explain(error, frames[0], self._type)) from None
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the payload is not valid MessagePack: {error}") from None
        finally:
            self._frames = ()

    def _decode_array(self, type_: type, value: Any) -> Any:
        array = decode_array(value, self._frames)
        return Tensor(array) if (get_origin(type_) or type_) is Tensor else array


def decode_array(value: Any, frames: Sequence[Frame]) -> Array:
    """`[dtype, shape, data]` as a read-only ndarray. Raises ValueError."""
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("an array must be [dtype, shape, data]")
    dtype_name, shape, data = value
    if not isinstance(dtype_name, str):
        raise ValueError("an array's dtype must be a string")
    descriptor = _TORCH_TO_NUMPY.get(dtype_name, dtype_name)
    if not _NUMERIC_DESCRIPTOR.fullmatch(descriptor):
        raise ValueError(f"dtype {dtype_name[:40]!r} is not supported")
    try:
        dtype = np.dtype(descriptor)
    except TypeError:
        raise ValueError(f"dtype {dtype_name!r} does not exist") from None
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 32:
        raise ValueError("an array's shape must be a list of lengths")
    if isinstance(data, dict):
        raise ValueError("an array in shared memory is not supported")
    if type(data) is int:
        if not 1 <= data < len(frames):
            raise ValueError(f"frame {data} is not among the {len(frames)} frames of the message")
        data = frames[data]
    elif not isinstance(data, memoryview):
        raise ValueError("an array's data must be raw bytes or the number of a frame")
    nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes do not make an array of {dtype_name} and shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape)


def peek_request_id(payload: Frame) -> str | None:
    """The leading string of an array whose rest may be rubbish, so that its sender can be answered."""
    data = bytes(payload[:PEEK_BYTES])
    start = {0xDC: 3, 0xDD: 5}.get(data[0], 1 if data[0] & 0xF0 == 0x90 else 0) if data else 0
    if start == 0 or len(data) <= start:
        return None
    head = data[start]
    if head & 0xE0 == 0xA0:
        begin, length = start + 1, head & 0x1F
    elif head in (0xD9, 0xDA):
        width = head - 0xD8
        begin = start + 1 + width
        length = int.from_bytes(data[start + 1 : begin], "big")
    else:
        return None
    text = data[begin : begin + length]
    if length == 0 or len(text) < length:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _raw_bytes(code: int, data: memoryview) -> memoryview:
    if code != RAW_EXT:
        raise ValueError(f"extension type {code} is refused: nothing is unpickled here")
    return data


def _explain(error: msgspec.ValidationError, payload: Frame, type_: type) -> str:
    """msgspec's message with field names for positions, and the value that was found."""
    text = str(error).replace("`", "")
    reason, _, path = text.partition(" - at $")
    steps = re.findall(r"\[(\d+|\.\.\.)\]|\.([\w]+)", path)
    if not steps:
        short = re.search(r"at least length \d+, got (\d+)", reason)
        fields = getattr(type_, "__struct_fields__", ())
        return f"the field {fields[int(short[1])]} is missing" if short and fields else reason
    names: list[str] = []
    try:
        value: Any = msgspec.msgpack.decode(payload, ext_hook=_raw_bytes)
    except (ValueError, RecursionError):
        value = None
    for position, (index, key) in enumerate(steps):
        fields = getattr(type_, "__struct_fields__", ()) if position == 0 else ()
        if key:
            names.append(f".{key}" if names else key)
        elif fields and int(index) < len(fields):
            names.append(fields[int(index)])
        else:
            names.append(f"[{index}]")
        value = _child(value, index, key)
    found = repr(value)
    return f"{''.join(names)}: {reason} (found {found if len(found) <= 80 else found[:77] + '...'})"


def _child(value: Any, index: str, key: str) -> Any:
    if key and isinstance(value, dict):
        return value.get(key)
    if index.isdigit() and isinstance(value, list) and int(index) < len(value):
        return value[int(index)]
    return None
