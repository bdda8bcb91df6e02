"""A step's outputs to frames, without an object per token.

A row with one new token and nothing else is `[request_id, [token]]`: the request brings the bytes before its
token (`wire_prefix`, made once), a table has the bytes of every token, one join makes the array of outputs.
The missing tail of the 19 fields means the defaults. Whatever is rarer is encoded from its struct.
"""

from __future__ import annotations

import struct
from operator import attrgetter

import msgspec

from engine_core.outputs import ClientOutputs
from engine_core.protocol import EngineCoreOutputs, SchedulerStats, UtilityOutput
from engine_core.wire import Frame, WireEncoder

_NIL = b"\xc0"
_wire_prefix = attrgetter("wire_prefix")
_encode = msgspec.msgpack.Encoder().encode


def wire_prefix(request_id: str) -> bytes:
    """What comes before the token in a plain row of this request."""
    return b"\x92" + _encode(request_id) + b"\x91"


class OutputEncoder:
    """Makes the messages of one engine. Not for use by two threads at once.

    Every message is of one family and not empty, which vLLM's Rust front end insists on.
    """

    def __init__(self, engine_index: int, vocab_size: int) -> None:
        self._engine_index = engine_index
        self._encoder = WireEncoder()
        self._token_bytes = [_encode(token) for token in range(vocab_size)]
        self._head = _encode([None] * 9)[:1] + _encode(engine_index)

    def outputs(
        self, outputs: ClientOutputs, timestamp: float, weight_version: str | None = None
    ) -> list[Frame] | None:
        """One client's message for a step; None if there is nothing to say.

        `timestamp`: the engine's monotonic clock, seconds.
        """
        rows = len(outputs.requests)
        total = rows + len(outputs.outputs)
        if not total and not outputs.finished_requests and outputs.scheduler_stats is None:
            return None
        frames: list[Frame] = [b""]
        parts = [b""] * (2 * rows)
        parts[::2] = map(_wire_prefix, outputs.requests)
        parts[1::2] = map(self._token_bytes.__getitem__, outputs.token_ids.tolist())
        encode = self._encoder.encode_part
        frames[0] = b"".join(
            (
                self._head,
                _array_header(total),
                *parts,
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


def _array_header(length: int) -> bytes:
    if length < 16:
        return bytes((0x90 | length,))
    if length < 1 << 16:
        return struct.pack(">BH", 0xDC, length)
    return struct.pack(">BI", 0xDD, length)
