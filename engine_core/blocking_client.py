"""A client for code without an event loop. It belongs to one thread, and works while a method of it runs."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from engine_core.client_connection import LAST_OUTPUTS_TIMEOUT_S, WARN_AFTER_S, Connection
from engine_core.client_controls import ClientControls
from engine_core.client_session import ClientSession, Prompt, RequestOutput, with_deadline
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError, ProtocolError, RequestError, UtilityError
from engine_core.protocol import FinishReason, ReadyResponse, SchedulerStats
from engine_core.scheduler.explain import Explanation
from engine_core.wire import Frame
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest
from transport.clock import SYSTEM_CLOCK, Clock

Client = TypeVar("Client", bound="BlockingClient")

DEFAULT_START_TIMEOUT_S = 600.0
DEFAULT_CONNECT_TIMEOUT_S = 10.0


class BlockingClient(ClientControls):
    """Requests to one engine, and their outputs.

    There are two ways to receive: `generate` iterates over one request; `add_request` sends any number
    without waiting, and `outputs` returns what has come for them, many at a time.

    Every method raises `EngineDeadError` once the engine is dead, with the first cause.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._session: ClientSession[_Stream, _Call] = ClientSession(clock)
        self._closed = False

    @abstractmethod
    def _send(self, frames: list[Frame]) -> None: ...

    @abstractmethod
    def _pump(self, deadline: float | None) -> bool:
        """Wait for messages and take them in. False when the deadline (monotonic) has passed."""

    @abstractmethod
    def _close(self) -> None: ...

    @property
    def num_live(self) -> int:
        """Requests of this client whose last output has not been received."""
        return self._session.num_live

    @property
    def stats(self) -> SchedulerStats | None:
        """The engine's last report to this client."""
        return self._session.stats

    def add_request(
        self,
        prompt_token_ids: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
        trace_headers: dict[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> str:
        """Send a request and return its id; `outputs` brings what comes of it."""
        return self._add(
            None,
            prompt_token_ids,
            with_deadline(params, deadline_s),
            request_id,
            priority,
            cache_salt,
            lora,
            trace_headers,
        )

    def outputs(self, timeout_s: float | None = None) -> list[RequestOutput]:
        """What has come for requests made with `add_request`; waits for something, at most `timeout_s`.

        Empty if nothing came in time, or if there is no such request. Failed requests end with an output that
        has an `error`.
        """
        session = self._session
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while True:
            outputs = session.take_unclaimed()
            if outputs:
                return outputs
            session.check_alive()
            if not session.num_live:
                return []
            if not self._pump(deadline):
                return []

    def generate(
        self,
        prompt_token_ids: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
        trace_headers: dict[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Send a request now; iterate over its outputs. Leaving the iterator early aborts the request.

        The iterator raises `RequestError` if the engine refuses or fails the request.
        """
        stream = _Stream()
        request_id = self._add(
            stream,
            prompt_token_ids,
            with_deadline(params, deadline_s),
            request_id,
            priority,
            cache_salt,
            lora,
            trace_headers,
        )
        return self._iterate(request_id, stream)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests: when this returns, no token of them follows, and their blocks and slots are free.

        Those that had not ended yet end with finish reason "abort".
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.utility("abort_requests", ids)
        self._session.finish_aborted(ids)

    def utility(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the engine. Raises `UtilityError` if it fails, TimeoutError."""
        call = _Call(method)
        self._send(self._session.call(call, args))
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while not call.done:
            if not self._pump(deadline):
                self._session.forget_call(call)
                raise TimeoutError(f"the engine did not answer {method} within {timeout_s:g} s")
        if call.error is not None:
            raise call.error
        return call.value

    def explain(self, request_id: str) -> Explanation:
        """Where a request of any client stands, live or ended in the last minutes; an unambiguous beginning
        of its id will do. Raises `UtilityError` if there is none.
        """
        return msgspec.convert(self.utility("explain", request_id), Explanation)

    def collective_rpc(
        self,
        method: str,
        timeout_s: float | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every rank; the answers by rank. `timeout_s` is for the ranks."""
        answers: list[Any] = self.utility("collective_rpc", method, timeout_s, list(args), kwargs)
        return answers

    def close(self) -> None:
        """Leave. Requests are aborted; a launched engine ends. Idempotent."""
        if not self._closed:
            self._closed = True
            self._session.fail(EngineDeadError("this client was closed"))
            self._close()

    def __enter__(self: Client) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(
        self,
        stream: _Stream | None,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        lora: LoRARequest | None,
        trace_headers: dict[str, str] | None,
    ) -> str:
        request_id, frames = self._session.add(
            prompt,
            params,
            stream,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            lora=lora,
            trace_headers=trace_headers,
        )
        self._send(frames)
        return request_id

    def _iterate(self, request_id: str, stream: _Stream) -> Iterator[RequestOutput]:
        finished = False
        try:
            while not finished:
                while not stream.outputs:
                    if stream.error is not None:
                        raise EngineDeadError(stream.error.cause)
                    self._pump(None)
                output = stream.outputs.popleft()
                finished = output.finish_code is not None
                if output.finish_code is FinishReason.ERROR:
                    raise output.error or RequestError("internal_error", "the request failed")
                yield output
        finally:
            if not finished and self._session.error is None:
                self._send(self._session.abort([request_id]))


class EngineClient(BlockingClient):
    """A client of an engine in another process."""

    def __init__(self, connection: Connection, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(clock)
        self._connection = connection
        self._poller = zmq.Poller()
        self._poller.register(connection.outputs, zmq.POLLIN)
        self._poller.register(connection.stream, zmq.POLLIN)

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        *,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        lobby: str | None = None,
        log_level: str = "WARNING",
    ) -> EngineClient:
        """Start an engine process, which ends with this client. With `lobby` other clients can join it there.

        Raises `EngineStartError` with the first error of the engine or its workers.
        """
        return cls(
            Connection.launch(config, start_timeout_s=start_timeout_s, lobby=lobby, log_level=log_level)
        )

    @classmethod
    def connect(cls, address: str, *, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> EngineClient:
        """Join a running engine at the address of its lobby. Raises `EngineUnreachableError`."""
        return cls(Connection.connect(address, timeout_s=timeout_s))

    @property
    def info(self) -> ReadyResponse:
        """What the engine is."""
        return self._connection.info

    @property
    def engine_pid(self) -> int:
        return self._connection.pid

    @property
    def client_index(self) -> int:
        return self._connection.client_index

    def _send(self, frames: list[Frame]) -> None:
        self._connection.send(frames)

    def _close(self) -> None:
        self._connection.close()

    def _pump(self, deadline: float | None) -> bool:
        connection, session = self._connection, self._session
        ready = self._wait(deadline)
        if not ready:
            return False
        alive = True
        if connection.outputs in ready:
            alive = self._read_all()
        if not alive or connection.stream.fileno() in ready:
            last_word = connection.last_word()
            self._read_all()  # what the engine sent before it ended
            if not last_word.crashed:
                self._await_last_outputs()
            session.fail(EngineDeadError(last_word.cause))
        return True

    def _wait(self, deadline: float | None) -> dict[Any, int]:
        """What can be read; nothing when the deadline has passed."""
        now = begun = self._clock.monotonic()
        warn_at = begun + WARN_AFTER_S
        while True:
            until = warn_at if deadline is None else min(warn_at, deadline)
            ready = dict(self._poller.poll(max(0, int((until - now) * 1000))))
            now = self._clock.monotonic()
            if ready or (deadline is not None and now >= deadline):
                return ready
            if now >= warn_at:
                self._connection.warn_of_silence(now - begun)
                warn_at = now + (now - begun)  # ever more rarely

    def _await_last_outputs(self) -> None:
        """They may come by another way than the last word, and later."""
        deadline = self._clock.monotonic() + LAST_OUTPUTS_TIMEOUT_S
        while self._session.num_live and (left := deadline - self._clock.monotonic()) > 0:
            self._connection.outputs.poll(int(left * 1000))
            self._read_all()

    def _read_all(self) -> bool:
        """False if the engine has said that it is dead."""
        read, feed = self._connection.outputs.recv_multipart, self._session.feed
        try:
            while feed(read(zmq.NOBLOCK)):
                pass
        except zmq.Again:
            return True
        except ProtocolError as error:
            self._session.fail(EngineDeadError(f"it sent a message that is none: {error}"))
            return True
        return False


class _Stream:
    def __init__(self) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self.error: EngineDeadError | None = None

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)

    def fail(self, error: EngineDeadError) -> None:
        self.error = error


class _Call:
    def __init__(self, method: str) -> None:
        self.method = method
        self.done = False
        self.value: Any = None
        self.error: EngineDeadError | UtilityError | None = None

    def answer(self, value: Any) -> None:
        self.value, self.done = value, True

    def fail(self, error: EngineDeadError | UtilityError) -> None:
        self.error, self.done = error, True
