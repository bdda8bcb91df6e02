"""Calls of worker methods, and their answers, as bytes.

Arguments and answers are plain data, that is what msgpack holds, and numpy arrays anywhere within; arrays
travel as raw bytes beside the rest. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from transport.codec import encode

if TYPE_CHECKING:
    from transport.ring import Buffer

CALL, REPLY = 3, 4  # kinds of message


class Call(msgspec.Struct, array_like=True):
    """Call `method` of the worker. Ranks other than `reply_rank` (None: none) answer without their value."""

    seq: int
    method: str
    args: Any
    kwargs: dict[str, Any]
    reply_rank: int | None


class Reply(msgspec.Struct, array_like=True):
    """The answer to a call: a value, or `error` with its traceback."""

    seq: int
    value: Any = None
    error: str | None = None
    traceback: str = ""


_ARRAY = 1  # extension code of an array's index in the message


def encode_call(call: Call) -> list[Buffer]:
    """Raises TypeError if an argument is neither plain data nor a numpy array."""
    return _encode_values(CALL, call)


def encode_reply(reply: Reply) -> list[Buffer]:
    """Raises TypeError if the value is neither plain data nor a numpy array."""
    return _encode_values(REPLY, reply)


def decode_call(head: memoryview, arrays: Sequence[npt.NDArray[Any]]) -> Call:
    call: Call = _decode_values(head, arrays, Call)
    return call


def decode_reply(head: memoryview, arrays: Sequence[npt.NDArray[Any]]) -> Reply:
    reply: Reply = _decode_values(head, arrays, Reply)
    return reply


def _encode_values(kind: int, message: Call | Reply) -> list[Buffer]:
    arrays: list[npt.NDArray[Any]] = []

    def put_aside(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(np.ascontiguousarray(value))
            return msgspec.msgpack.Ext(_ARRAY, str(len(arrays) - 1).encode())
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is neither plain data nor a numpy array")

    head = msgspec.Raw(msgspec.msgpack.encode(message, enc_hook=put_aside))
    return encode(kind, head, arrays)


def _decode_values(head: memoryview, arrays: Sequence[npt.NDArray[Any]], type_: type[Any]) -> Any:
    def bring_back(code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            raise ValueError(f"extension {code} is not an array")
        return arrays[int(bytes(data))]

    return msgspec.msgpack.decode(head, type=type_, ext_hook=bring_back)
