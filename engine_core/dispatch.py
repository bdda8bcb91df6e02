"""From frames to the engine and from its outputs back to frames, without a socket.

`receive` takes one message of one client; `step` runs the engine once. Both leave what is to be sent in
`outbox`, in order. Nothing that a client sends raises here: a bad message is answered if its request id can
be read, and harms nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from engine_core.backlog import Backlog
from engine_core.control import EngineControl
from engine_core.core import EngineCore
from engine_core.encoding import OutputEncoder, wire_prefix
from engine_core.errors import ProtocolError, RequestError
from engine_core.logs import BoundedWarnings
from engine_core.outputs import ClientOutputs, StepOutputs, finish_outputs
from engine_core.protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    OutputError,
    RequestType,
    SchedulerStats,
    UtilityOutput,
    UtilityRequest,
)
from engine_core.request import Request
from engine_core.validation import VALIDATION_ERROR
from engine_core.wire import Frame, WireDecoder, peek_request_id
from transport.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger("engine_core")


class Dispatcher:
    """All methods belong to the thread of the step loop."""

    def __init__(self, core: EngineCore, engine_index: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._core = core
        self._clock = clock
        self._scheduler = core.scheduler
        self._limits = core.scheduler.limits
        self._max_payload_bytes = self._limits.max_payload_bytes
        self._encoder = OutputEncoder(engine_index)
        self._requests = WireDecoder(EngineCoreRequest)
        self._ids = WireDecoder(list[str])
        self._calls = WireDecoder(UtilityRequest)
        self._backlogs: dict[int, Backlog] = {}  # of clients that do not keep up
        self._max_backlog = core.config.max_client_backlog
        self._warn = BoundedWarnings(logger, clock).warn
        self.control = EngineControl(core, self._emit)
        self.client_names: dict[int, str] = {}  # for messages
        self.closing = False  # no new work is taken
        self.outbox: list[tuple[int, list[Frame]]] = []  # (client index, message)

    def receive(self, client_index: int, group: range, frames: Sequence[Frame]) -> None:
        """One message from client `client_index`; `group` are the clients of the same front end."""
        kind = bytes(frames[0][:2])
        payload = frames[1:]
        try:
            if kind == RequestType.ADD:
                self._receive_request(client_index, group, payload)
            elif kind == RequestType.ABORT:
                self._core.abort_requests(self._ids.decode(_with_payload(payload)))
            elif kind == RequestType.UTILITY:
                self._receive_call(client_index, group, payload)
            elif kind != RequestType.START_DP_WAVE:
                raise ProtocolError(f"unknown message type {kind!r}")
        except ProtocolError as error:
            self._warn("client %d: message dropped: %s", client_index, error)
        self._tell_if_idle()

    def aborted_ids(self, frames: Sequence[Frame]) -> list[str]:
        """The ids in an ABORT message; empty for any other."""
        if frames[0] != RequestType.ABORT or len(frames) < 2:
            return []
        try:
            return self._ids.decode(frames[1:])
        except ProtocolError:
            return []  # `receive` will say so

    def step(self) -> None:
        """One turn of the engine."""
        if self._core.next_deadline_s is not None:
            self.end_overdue()
        outputs = self._core.step_fn()
        if outputs:
            self._emit(outputs)
        self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if self.control.waits_for_idle and not self._core.has_work:
            self.control.notify_idle()

    def end_overdue(self) -> None:
        """End the requests whose time is up."""
        self._emit(self._core.end_overdue())

    def check_workers(self) -> None:
        """The workers have failed, it is said."""
        self._emit(self._core.check_workers())

    def abort_client(self, client_index: int) -> int:
        """End the requests of a client that is gone, without outputs; returns how many."""
        self._encoder.forget(client_index)
        self.client_names.pop(client_index, None)
        self._backlogs.pop(client_index, None)
        return len(self._core.abort_requests(self._requests_of(client_index)))

    def tell_aborted(self, client_index: int) -> int:
        """End the requests of a client, with an output for each that says so; returns how many."""
        self._encoder.forget(client_index)
        self._backlogs.pop(client_index, None)
        ended = self._core.abort_requests(self._requests_of(client_index))
        self._emit(finish_outputs(ended))
        return len(ended)

    # Clients that do not keep up

    def hold_back(self, client_index: int) -> None:
        """From now on, merge what there is for this client instead of adding it to the outbox."""
        self._backlogs[client_index] = Backlog()

    def is_full(self, client_index: int) -> bool:
        """Whether so much is held back that its requests have been ended, and no more should be taken."""
        return self._backlogs[client_index].size > self._max_backlog

    def release(self, client_index: int) -> list[list[Frame]]:
        """What was held back, as messages. Whatever comes now goes to the outbox."""
        outputs, messages = self._backlogs.pop(client_index).take()
        frames = self._encode(client_index, outputs, self._clock.monotonic())
        return messages if frames is None else [frames, *messages]

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return self._scheduler.num_running, self._scheduler.num_waiting

    def encode_counts(self) -> list[Frame]:
        """For the coordinator."""
        running, waiting = self.counts()
        stats = SchedulerStats(running, waiting, kv_cache_usage=self._scheduler.kv.pool.usage)
        return self._encoder.counts(stats, self._clock.monotonic())

    def _receive_request(self, client_index: int, group: range, payload: Sequence[Frame]) -> None:
        payload = _with_payload(payload)
        if len(payload[0]) > self._max_payload_bytes:
            self._refuse_unread(
                client_index,
                payload[0],
                f"the request has {len(payload[0])} bytes; none that fits the model's maximum length of "
                f"{self._limits.max_model_len} tokens has more than {self._max_payload_bytes}",
            )
            return
        try:
            wire = self._requests.decode(payload)
        except ProtocolError as error:
            self._refuse_unread(client_index, payload[0], str(error))
            return
        try:
            wire.client_index = client_index = _resolve(wire.client_index, client_index, group)
        except ProtocolError as error:
            self._refuse(client_index, wire.request_id, RequestError(VALIDATION_ERROR, str(error)))
            return
        if self.closing:
            self._finish(client_index, wire.request_id, FinishReason.ABORT)
            return
        refusal = self.control.refusal
        if refusal is not None and not wire.abort_immediately:
            self._finish(client_index, wire.request_id, FinishReason.ERROR, refusal)
            return
        try:
            request = Request.from_wire(wire, self._limits, self._scheduler.hasher)
            request.wire_prefix = wire_prefix(request.request_id)
            self._core.add_request(request)
        except RequestError as error:
            self._warn("client %d: request %s refused: %s", client_index, wire.request_id, error)
            self._refuse(client_index, wire.request_id, error)

    def _receive_call(self, client_index: int, group: range, payload: Sequence[Frame]) -> None:
        call = self._calls.decode(_with_payload(payload))
        client_index = _resolve(call.client_index, client_index, group)
        if self.closing:
            self._reply(client_index, call, UtilityOutput(call.call_id, "Server shutting down"))
            return
        caller = self.client_names.get(client_index, f"client {client_index}")
        self.control.call(call, lambda output: self._reply(client_index, call, output), caller, payload)

    def _reply(self, client_index: int, call: UtilityRequest, output: UtilityOutput) -> None:
        now = self._clock.monotonic()
        try:
            frames = self._encoder.utility(output, now)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, RecursionError) as error:
            message = f"Call to {call.method} method failed: its result cannot be sent: {error}"
            frames = self._encoder.utility(UtilityOutput(call.call_id, message), now)
        self._put(client_index, frames)

    def _refuse_unread(self, client_index: int, payload: Frame, message: str) -> None:
        request_id = peek_request_id(payload)
        if request_id is None:
            raise ProtocolError(f"the request cannot be read, not even its id: {message}")
        self._warn("client %d: request %s refused: %s", client_index, request_id, message)
        self._refuse(client_index, request_id, RequestError(VALIDATION_ERROR, message))

    def _refuse(self, client_index: int, request_id: str, error: RequestError) -> None:
        output_error = OutputError(error.code, error.message, error.retryable)
        self._finish(client_index, request_id, FinishReason.ERROR, output_error)

    def _finish(
        self, client_index: int, request_id: str, reason: FinishReason, error: OutputError | None = None
    ) -> None:
        output = EngineCoreOutput(request_id, [], finish_reason=reason, error=error)
        self._emit({client_index: ClientOutputs(outputs=[output], finished_requests=[request_id])})

    def _emit(self, outputs: StepOutputs) -> None:
        now = self._clock.monotonic()
        for client_index, client_outputs in outputs.items():
            if client_index in self._backlogs:
                self._add_to_backlog(client_index, client_outputs)
                continue
            frames = self._encode(client_index, client_outputs, now)
            if frames is not None:
                self.outbox.append((client_index, frames))

    def _encode(self, client_index: int, outputs: ClientOutputs, now: float) -> list[Frame] | None:
        return self._encoder.outputs(client_index, outputs, now, self.control.weights.version)

    def _put(self, client_index: int, frames: list[Frame]) -> None:
        backlog = self._backlogs.get(client_index)
        if backlog is not None:
            backlog.add_message(frames)
        else:
            self.outbox.append((client_index, frames))

    def _add_to_backlog(self, client_index: int, outputs: ClientOutputs) -> None:
        backlog = self._backlogs[client_index]
        backlog.add(outputs)
        if backlog.size <= self._max_backlog:
            return
        ids = self._requests_of(client_index)
        if ids:
            message = f"about {backlog.size} tokens wait for this client, which does not read them"
            ended = self._scheduler.finish_requests(ids, FinishReason.ERROR)
            backlog.add(finish_outputs(ended, OutputError("slow_client", message, True))[client_index])
            self._warn("client %d: its %d requests are ended: %s", client_index, len(ended), message)

    def _requests_of(self, client_index: int) -> list[str]:
        return [r.request_id for r in self._scheduler.requests.values() if r.client_index == client_index]


def _with_payload(frames: Sequence[Frame]) -> Sequence[Frame]:
    if not frames:
        raise ProtocolError("the message has no payload")
    return frames


def _resolve(position: int, sender: int, group: range) -> int:
    """The client to answer: a front end's API servers name themselves, alone one is whoever sent."""
    if len(group) == 1:
        return sender
    if not 0 <= position < len(group):
        raise ProtocolError(f"client_index {position} is not one of the front end's {len(group)}")
    return group[position]
