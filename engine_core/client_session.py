"""What the clients have in common: requests and calls to frames, the engine's frames to outputs. No I/O."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.errors import EngineDeadError, RequestError, UtilityError
from engine_core.protocol import (
    ENGINE_CORE_DEAD,
    Array,
    EngineCoreEvent,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    LogprobsTensors,
    OutputError,
    PrefillStats,
    RequestType,
    SchedulerStats,
    Tensor,
    UtilityOutput,
    UtilityRequest,
)
from engine_core.validation import VALIDATION_ERROR
from engine_core.wire import Frame, WireDecoder, WireEncoder
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest
from transport.clock import SYSTEM_CLOCK, Clock

_TOKEN_TYPE = np.dtype("<i4")
Prompt = Sequence[int] | npt.NDArray[np.integer[Any]]


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request; the last output has a finish reason.

    It is `EngineCoreOutput` as the client sees it, made directly from the wire.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: LogprobsLists | None = None  # one row per new token
    prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: Any = None
    finish_code: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token, or "repetition_detected"
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None  # with the first output
    routed_experts: Array | None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: dict[str, Any] | None = None
    prompt_token_id_logprobs: Tensor | None = None
    error_info: OutputError | None = None
    weight_version: str | None = None  # of the step that it comes from; set from the envelope

    @property
    def finished(self) -> bool:
        return self.finish_code is not None

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort", "error" or "repetition"."""
        return None if self.finish_code is None else str(self.finish_code)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; with the first output."""
        return None if self.prefill_stats is None else self.prefill_stats.num_cached_tokens

    @property
    def prompt_logprobs(self) -> LogprobsLists | None:
        """Of prompt tokens 1..P-1, a row each; with the first output."""
        tensors = self.prompt_logprobs_tensors
        if tensors is None:
            return None
        return LogprobsLists(
            tensors.logprob_token_ids.array, tensors.logprobs.array, tensors.selected_token_ranks.array
        )

    @property
    def error(self) -> RequestError | None:
        """Why the request failed, with finish reason "error"."""
        if self.finish_code is not FinishReason.ERROR:
            return None
        info = self.error_info
        if info is None:
            return RequestError("internal_error", "the engine failed the request", False, self.request_id)
        return RequestError(info.code, info.message, info.retryable, self.request_id)


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """`EngineCoreOutputs` as the client sees it."""

    engine_index: int = 0
    outputs: list[RequestOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


class Stream(Protocol):
    """Where a request's outputs go if somebody iterates over them."""

    def put(self, output: RequestOutput) -> None: ...
    def fail(self, error: EngineDeadError) -> None: ...


class Call(Protocol):
    """Who waits for a utility call."""

    method: str

    def answer(self, value: Any) -> None: ...
    def fail(self, error: EngineDeadError | UtilityError) -> None: ...


S = TypeVar("S", bound=Stream)
C = TypeVar("C", bound=Call)


def with_deadline(params: SamplingParams | None, deadline_s: float | None) -> SamplingParams | None:
    """The engine ends the request, with error "deadline_exceeded", so many seconds after it came."""
    if deadline_s is None:
        return params
    params = SamplingParams() if params is None else params
    return msgspec.structs.replace(params, extra_args={**(params.extra_args or {}), "deadline_s": deadline_s})


class ClientSession(Generic[S, C]):
    """A client's live requests and calls."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._encoder = WireEncoder()
        self._decoder = WireDecoder(Envelope)
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._call_ids = itertools.count(1)
        self._live: dict[str, S | None] = {}
        self._num_streams = 0
        self._calls: dict[int, C] = {}
        self._unclaimed: list[RequestOutput] = []  # outputs of requests without a stream
        self.stats: SchedulerStats | None = None  # the last that came
        self.weight_version: str | None = None
        self.error: EngineDeadError | None = None

    @property
    def num_live(self) -> int:
        """Requests whose last output has not come."""
        return len(self._live)

    @property
    def is_awaited(self) -> bool:
        """Whether something is to come from the engine."""
        return bool(self._live or self._calls)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        stream: S | None,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        lora: LoRARequest | None,
        trace_headers: dict[str, str] | None,
    ) -> tuple[str, list[Frame]]:
        """The request's id and its message. Raises `RequestError` for what cannot even be sent."""
        self.check_alive()
        if request_id is None:
            request_id = f"{self._prefix}-{next(self._numbers)}"
        elif request_id in self._live:
            raise RequestError(
                "duplicate_request_id", f"request {request_id!r} of this client is live", False, request_id
            )
        try:
            tokens = _token_bytes(prompt)
        except ValueError as error:
            raise RequestError(VALIDATION_ERROR, str(error), False, request_id) from None
        request = EngineCoreRequest(
            request_id,
            tokens,
            None,
            params if params is not None else SamplingParams(),
            None,
            self._clock.time(),
            lora,
            cache_salt,
            None,
            priority=priority,
            trace_headers=trace_headers,
        )
        frames = [RequestType.ADD, *self._encoder.encode(request)]
        self._live[request_id] = stream
        self._num_streams += stream is not None
        return request_id, frames

    def abort(self, request_ids: Iterable[str]) -> list[Frame]:
        """A message that ends requests without an answer; their outputs are dropped from now on."""
        ids = [request_id for request_id in request_ids if self._forget(request_id)]
        return [RequestType.ABORT, *self._encoder.encode(ids)]

    def call(self, call: C, args: Sequence[Any]) -> list[Frame]:
        self.check_alive()
        call_id = next(self._call_ids)
        frames = [
            RequestType.UTILITY,
            *self._encoder.encode(UtilityRequest(0, call_id, call.method, list(args))),
        ]
        self._calls[call_id] = call
        return frames

    def feed(self, frames: Sequence[Frame]) -> bool:
        """Take in one message. False for the engine's last one, ENGINE_CORE_DEAD. Raises `ProtocolError`."""
        if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
            return False
        envelope = self._decoder.decode(frames)
        version = envelope.weight_version
        if envelope.outputs:
            if version is not None:
                for output in envelope.outputs:
                    output.weight_version = version
            self._distribute(envelope.outputs)
        if envelope.scheduler_stats is not None:
            self.stats = envelope.scheduler_stats
        if version is not None:
            self.weight_version = version
        answer = envelope.utility_output
        if answer is not None:
            call = self._calls.pop(answer.call_id, None)
            if call is None:
                pass  # an unsolicited notice, or its caller has given up
            elif answer.failure_message is not None:
                call.fail(UtilityError(call.method, answer.failure_message))
            else:
                call.answer(answer.result[1] if answer.result is not None else None)
        return True

    def take_unclaimed(self) -> list[RequestOutput]:
        """Outputs of requests that were added without a stream."""
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def finish_aborted(self, request_ids: Iterable[str]) -> None:
        """The engine has confirmed that nothing more comes of these."""
        aborted = [
            RequestOutput(request_id, [], finish_code=FinishReason.ABORT)
            for request_id in request_ids
            if request_id in self._live
        ]
        self._distribute(aborted)

    def fail(self, error: EngineDeadError) -> None:
        """The engine is dead: everybody who waits hears why."""
        if self.error is not None:
            return
        self.error = error
        for stream in self._live.values():
            if stream is not None:
                stream.fail(error)
        for call in self._calls.values():
            call.fail(error)
        self._live.clear()
        self._calls.clear()

    def forget_call(self, call: C) -> None:
        self._calls = {call_id: other for call_id, other in self._calls.items() if other is not call}

    def check_alive(self) -> None:
        if self.error is not None:
            raise EngineDeadError(self.error.cause)

    def _distribute(self, outputs: list[RequestOutput]) -> None:
        live = self._live
        if not self._num_streams:
            for output in outputs:
                if output.finish_code is not None:
                    live.pop(output.request_id, None)
            self._unclaimed = self._unclaimed + outputs if self._unclaimed else outputs
            return
        for output in outputs:
            request_id = output.request_id
            if request_id not in live:
                continue  # given up meanwhile
            stream = live[request_id]
            if output.finish_code is not None:
                self._forget(request_id)
            if stream is not None:
                stream.put(output)
            else:
                self._unclaimed.append(output)

    def _forget(self, request_id: str) -> bool:
        if request_id not in self._live:
            return False
        self._num_streams -= self._live.pop(request_id) is not None
        return True


def _token_bytes(prompt: Prompt) -> bytes:
    """As int32, little-endian. Raises ValueError for what is no list of such numbers."""
    try:
        tokens = np.asarray(prompt)
    except (OverflowError, TypeError, ValueError):
        tokens = np.empty(1, object)
    if tokens.ndim == 1 and (not len(tokens) or tokens.dtype.kind in "iu"):
        narrow = tokens.astype(_TOKEN_TYPE)
        if (narrow == tokens).all():
            return narrow.tobytes()
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
        raise ValueError(f"the prompt is not a list of token ids but {prompt!r:.50}")
    for position, token in enumerate(prompt):
        if (
            isinstance(token, bool)
            or not isinstance(token, (int, np.integer))
            or not -(2**31) <= token < 2**31
        ):
            raise ValueError(f"token {position} of the prompt is {token!r:.50}, and no token id")
    raise ValueError("the prompt is not a list of token ids")
