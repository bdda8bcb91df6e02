"""A step's outputs to frames, without an object per token.

A row with one new token and nothing else is `[request_id, [token]]`, the token always in 5 bytes. As long as
a client's plain rows are of the same requests, their bytes differ in the tokens only, and those are written
into the last message's rows by one vector operation. The missing tail of the 19 fields means the defaults.
Whatever is rarer is encoded from its struct.
"""

from __future__ import annotations

import struct
import sys
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.outputs import ClientOutputs
from engine_core.protocol import EngineCoreOutputs, SchedulerStats, UtilityOutput
from engine_core.wire import Frame, WireEncoder

if TYPE_CHECKING:
    from engine_core.request import Request

_NIL = b"\xc0"
_TOKEN = b"\xce\0\0\0\0"  # uint32, to be overwritten
_wire_prefix = attrgetter("wire_prefix")
_encode = msgspec.msgpack.Encoder().encode


def wire_prefix(request_id: str) -> bytes:
    """What comes before the token in a plain row of this request."""
    return b"\x92" + _encode(request_id) + b"\x91"


class PlainRows:
    """The plain rows of one client's last message."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._rows = np.empty(0, np.uint8)
        self._token_bytes = np.empty(0, np.intp)  # where the tokens are in it

    def encode(self, requests: list[Request], token_ids: npt.NDArray[np.int32]) -> bytes:
        """requests[i] gets token_ids[i]."""
        if requests != self._requests:  # compares identities
            self._requests = requests.copy()
            self._lay_out()
        self._rows[self._token_bytes] = token_ids.astype(">u4").view(np.uint8)
        return self._rows.tobytes()

    def _lay_out(self) -> None:
        prefixes = [*map(_wire_prefix, self._requests), b""]
        lengths = np.fromiter(map(len, prefixes[:-1]), np.intp, len(prefixes) - 1)
        ends = np.cumsum(lengths + len(_TOKEN))
        self._rows = np.frombuffer(bytearray(_TOKEN.join(prefixes)), np.uint8)
        self._token_bytes = (ends[:, None] + np.arange(-4, 0)).ravel()


class OutputEncoder:
    """Makes the messages of one engine. Not for use by two threads at once.

    Every message is of one family and not empty, which vLLM's Rust front end insists on.
    """

    def __init__(self, engine_index: int) -> None:
        self._engine_index = engine_index
        # One frame a message. libzmq 4.3 aborts the process when a socket is closed while its peer dies in
        # the middle of a message of several (session_base.cpp, `clean_pipes`). Clients do die in the middle.
        self._encoder = WireEncoder(inline_bytes=sys.maxsize)
        self._plain_rows: dict[int, PlainRows] = {}  # by client
        self._head = _encode([None] * 9)[:1] + _encode(engine_index)

    def outputs(
        self,
        client_index: int,
        outputs: ClientOutputs,
        timestamp: float,
        weight_version: str | None = None,
    ) -> list[Frame] | None:
        """One client's message for a step; None if there is nothing to say.

        `timestamp`: the engine's monotonic clock, seconds.
        """
        total = len(outputs.requests) + len(outputs.outputs)
        if not total and not outputs.finished_requests and outputs.scheduler_stats is None:
            return None
        rows = b""
        if outputs.requests:
            plain = self._plain_rows.get(client_index)
            if plain is None:
                plain = self._plain_rows[client_index] = PlainRows()
            rows = plain.encode(outputs.requests, outputs.token_ids)
        frames: list[Frame] = [b""]
        encode = self._encoder.encode_part
        frames[0] = b"".join(
            (
                self._head,
                array_header(total),
                rows,
                *[encode(output, frames) for output in outputs.outputs],
                encode(outputs.scheduler_stats, frames),
                b"\xcb" + struct.pack(">d", timestamp),
                _NIL,  # utility_output
                encode(outputs.finished_requests or None, frames),
                _NIL,  # wave_complete
                _NIL,  # start_wave
                encode(weight_version, frames),
            )
        )
        return frames

    def forget(self, client_index: int) -> None:
        """The client is gone."""
        self._plain_rows.pop(client_index, None)

    def utility(self, output: UtilityOutput, timestamp: float) -> list[Frame]:
        """Raises TypeError if the result has something in it that does not travel."""
        return self._encoder.encode(
            EngineCoreOutputs(self._engine_index, timestamp=timestamp, utility_output=output)
        )

    def counts(self, stats: SchedulerStats, timestamp: float) -> list[Frame]:
        """The coordinator's message: stats alone."""
        return self._encoder.encode(
            EngineCoreOutputs(self._engine_index, scheduler_stats=stats, timestamp=timestamp)
        )


def array_header(length: int) -> bytes:
    """What precedes the elements of a msgpack array."""
    if length < 16:
        return bytes((0x90 | length,))
    if length < 1 << 16:
        return struct.pack(">BH", 0xDC, length)
    return struct.pack(">BI", 0xDD, length)
