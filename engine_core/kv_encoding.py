"""KV events to msgpack, mostly without an object per event.

What a step of many decodes stores is a block here and a block there, each the next of its request. The
msgpack of such an event has the same length each time: many are made at once, by filling in copies of a
template.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.encoding import array_header
from engine_core.kv_events import RawEvent, StoredBlocks, token_bytes, wire_events
from engine_core.request import Request
from executor.sampling_params import SamplingParams

_encode = msgspec.msgpack.Encoder().encode
_TOKEN = 0x7FFFFFFF  # takes five bytes in msgpack, as all tokens do here: the code of uint32, and the number
_TOKEN_BYTES = 5


class BatchEncoder:
    """Makes the payloads of one engine. For one thread."""

    def __init__(self, block_size: int, data_parallel_rank: int) -> None:
        self._block_size = block_size
        self._tail = _encode(data_parallel_rank)
        self._templates: dict[int, _Template] = {}  # by length of a hash

    def encode(self, ts: float, raw: Sequence[RawEvent]) -> bytes:
        """A `KVEventBatch`."""
        parts: list[bytes] = []
        count = 0
        start = 0
        while start < len(raw):
            end = start
            is_plain = _is_plain(raw[start])
            while end < len(raw) and _is_plain(raw[end]) == is_plain:
                end += 1
            run = raw[start:end]
            if is_plain:
                parts.append(self._plain(run))  # type: ignore[arg-type]  # none of them is anything else
                count += len(run)
            else:
                events = [_encode(event) for event in wire_events(run, self._block_size)]
                parts += events
                count += len(events)
            start = end
        head = array_header(3) + b"\xcb" + struct.pack(">d", ts) + array_header(count)
        return b"".join((head, *parts, self._tail))

    def _plain(self, events: Sequence[StoredBlocks]) -> bytes:
        hashes = [request.block_hashes[first] for request, first, _ in events]
        parents = [request.block_hashes[first - 1] for request, first, _ in events]
        size = self._block_size
        tokens = [token_bytes(request, first * size, last * size) for request, first, last in events]
        width = len(hashes[0])
        template = self._templates.get(width)
        if template is None:
            template = self._templates[width] = _Template(size, width)
        return template.fill(hashes, parents, tokens)


def _is_plain(event: RawEvent) -> bool:
    """One block that is not the first of its request, which has no adapter."""
    return (
        isinstance(event, StoredBlocks)
        and event.last - event.first == 1
        and event.first > 0
        and event.request.lora is None
    )


class _Template:
    """The msgpack of an event like that, with hashes of `width` bytes."""

    def __init__(self, block_size: int, width: int) -> None:
        marks = [bytes([mark]) * width for mark in (0xF1, 0xF2)]
        tokens = np.full(2 * block_size, _TOKEN, np.int32)
        model = Request("", tokens, SamplingParams())
        model.block_hashes = marks
        (event,) = wire_events([StoredBlocks(model, 1, 2)], block_size)
        data = _encode(event)
        self._bytes = np.frombuffer(data, np.uint8)
        self._parent, self._hash = (slice(at := data.index(mark), at + width) for mark in marks)
        at = data.index(_encode(_TOKEN) * block_size)
        self._tokens = slice(at, at + _TOKEN_BYTES * block_size)

    def fill(self, hashes: list[bytes], parents: list[bytes], tokens: list[bytes]) -> bytes:
        """`tokens`: those of each block, int32."""
        count = len(hashes)
        events = np.tile(self._bytes, (count, 1))
        events[:, self._hash] = _rows(hashes)
        events[:, self._parent] = _rows(parents)
        numbers = np.frombuffer(b"".join(tokens), np.int32).astype(">u4")
        cells = events[:, self._tokens].reshape(count, -1, _TOKEN_BYTES)
        cells[:, :, 1:] = numbers.view(np.uint8).reshape(count, -1, 4)
        events[:, self._tokens] = cells.reshape(count, -1)
        return events.tobytes()


def _rows(texts: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), -1)
