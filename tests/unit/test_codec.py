"""Columns survive the trip, in place and without being boxed."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transport import CodecError
from transport.codec import decode, encode
from transport.ring import nbytes_of

DTYPES = ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


def joined(parts: list[Any]) -> bytes:
    data = b"".join(
        memoryview(np.ascontiguousarray(p)).cast("B") if isinstance(p, np.ndarray) else p for p in parts
    )
    assert len(data) == sum(map(nbytes_of, parts))
    return data


@given(
    st.integers(0, 65535),
    st.dictionaries(st.text(max_size=5), st.integers(0, 2**60)),
    st.lists(
        hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)),
        max_size=6,
    ),
)
def test_what_is_encoded_is_decoded(kind: int, head: dict[str, int], arrays: list[Any]) -> None:
    got_kind, got_head, got_arrays = decode(joined(encode(kind, head, arrays)))
    assert got_kind == kind
    assert msgspec.msgpack.decode(got_head) == head
    assert len(got_arrays) == len(arrays)
    for got, sent in zip(got_arrays, arrays, strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.tobytes() == sent.tobytes()


def test_arrays_are_aligned_read_only_views_of_the_message() -> None:
    data = joined(
        encode(1, "head", [np.arange(3, dtype=np.int32), np.arange(5.0), np.arange(3, dtype=np.int8)])
    )
    _, _, arrays = decode(data)
    buffer = np.frombuffer(data, np.uint8)
    for array in arrays:
        assert np.shares_memory(array, buffer)
        assert array.ctypes.data % 8 == buffer.ctypes.data % 8
        assert not array.flags.writeable


def test_arrays_are_sent_without_a_copy_unless_they_have_gaps() -> None:
    solid = np.arange(10)
    assert any(part is solid for part in encode(0, None, [solid]))
    gaps = np.arange(20)[::2]
    assert decode(joined(encode(0, None, [gaps])))[2][0].tolist() == gaps.tolist()


@pytest.mark.parametrize(
    "array", [np.array(["text"]), np.array([None]), np.arange(3).astype(">i4"), np.array([1j])]
)
def test_an_array_that_cannot_be_sent_is_refused(array: Any) -> None:
    with pytest.raises(CodecError, match="dtype"):
        encode(0, None, [array])


def test_a_kind_out_of_range_is_refused() -> None:
    with pytest.raises(CodecError):
        encode(-1, None)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(CodecError):
        decode(data)


def test_a_cut_message_is_an_error() -> None:
    data = joined(encode(3, {"a": 1}, [np.arange(100, dtype=np.int32), np.ones((3, 4))]))
    for length in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:length])
    with pytest.raises(CodecError):
        decode(data + bytes(8))
