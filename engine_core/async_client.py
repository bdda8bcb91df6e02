"""A client for asyncio (uvloop or the standard loop). It belongs to the loop it was opened in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from types import TracebackType
from typing import Any

import msgspec
import zmq

from engine_core.blocking_client import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_START_TIMEOUT_S
from engine_core.client_connection import LAST_OUTPUTS_TIMEOUT_S, WARN_AFTER_S, Connection
from engine_core.client_controls import ClientControls
from engine_core.client_session import ClientSession, Prompt, RequestOutput, with_deadline
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError, ProtocolError, RequestError, UtilityError
from engine_core.protocol import FinishReason, ReadyResponse, SchedulerStats
from engine_core.scheduler.explain import Explanation
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest
from transport.clock import SYSTEM_CLOCK, Clock


class AsyncEngineClient(ClientControls):
    """Requests to one engine, and their outputs.

    There are two ways to receive: `generate` iterates over one request; `add_request` sends any number
    without waiting, and `outputs` returns what has come for them, many at a time.

    Every method raises `EngineDeadError` once the engine is dead, with the first cause; also if it waits.
    """

    def __init__(self, connection: Connection, clock: Clock = SYSTEM_CLOCK) -> None:
        """In the event loop's thread."""
        self._connection = connection
        self._clock = clock
        self._session: ClientSession[_Stream, _Call] = ClientSession(clock)
        self._loop = asyncio.get_running_loop()
        self._outputs_fd: int = connection.outputs.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._output_came: asyncio.Future[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closed = False
        self._loop.add_reader(self._outputs_fd, self._read_all)
        self._stream_fd = connection.stream.fileno()
        self._loop.add_reader(self._stream_fd, self._engine_ended)
        # The descriptor tells of changes only: what came before it was watched must be asked for.
        self._loop.call_soon(self._read_all)
        self._last_heard_s = clock.monotonic()
        self._warn_after_s = WARN_AFTER_S
        self._silence_check = self._loop.call_later(WARN_AFTER_S, self._check_silence)

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        *,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        lobby: str | None = None,
        log_level: str = "WARNING",
    ) -> Opening:
        """Start an engine process, which ends with this client. With `lobby` other clients can join there.

        To be awaited or used with `async with`; raises `EngineStartError` with the first error of the engine
        or its workers.
        """
        return Opening(
            lambda started: Connection.launch(
                config, start_timeout_s=start_timeout_s, lobby=lobby, log_level=log_level, started=started
            )
        )

    @classmethod
    def connect(cls, address: str, *, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Opening:
        """Join a running engine at the address of its lobby. To be awaited or used with `async with`."""
        return Opening(lambda started: Connection.connect(address, timeout_s=timeout_s, started=started))

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

    async def outputs(self) -> list[RequestOutput]:
        """What has come for requests made with `add_request`; waits for something.

        Empty if there is no such request. Failed requests end with an output that has an `error`.
        """
        session = self._session
        while True:
            outputs = session.take_unclaimed()
            if outputs:
                return outputs
            session.check_alive()
            if not session.num_live:
                return []
            if self._output_came is None:
                self._output_came = self._loop.create_future()
            await asyncio.shield(self._output_came)

    async def generate(
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
    ) -> AsyncIterator[RequestOutput]:
        """Send a request and iterate over its outputs. Leaving early or being cancelled aborts the request.

        Raises `RequestError` if the engine refuses or fails the request.
        """
        stream = _Stream(self._loop)
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
        finished = False
        try:
            while not finished:
                output = stream.outputs.popleft() if stream.outputs else await stream.next()
                finished = output.finish_code is not None
                if output.finish_code is FinishReason.ERROR:
                    raise output.error or RequestError("internal_error", "the request failed")
                yield output
        finally:
            if not finished and self._session.error is None:
                self._connection.send(self._session.abort([request_id]))

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests: when this returns, no token of them follows, and their blocks and slots are free.

        Those that had not ended yet end with finish reason "abort".
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        await self.utility("abort_requests", ids)
        self._session.finish_aborted(ids)
        self._tell_outputs()

    async def utility(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the engine. Raises `UtilityError` if it fails, TimeoutError."""
        call = _Call(method, self._loop)
        self._connection.send(self._session.call(call, args))
        try:
            return await asyncio.wait_for(call.future, timeout_s)
        except asyncio.TimeoutError:
            raise TimeoutError(f"the engine did not answer {method} within {timeout_s:g} s") from None
        finally:
            if not call.future.done() or call.future.cancelled():
                self._session.forget_call(call)

    async def explain(self, request_id: str) -> Explanation:
        """Where a request of any client stands, live or ended in the last minutes; an unambiguous beginning
        of its id will do. Raises `UtilityError` if there is none.
        """
        return msgspec.convert(await self.utility("explain", request_id), Explanation)

    async def collective_rpc(
        self,
        method: str,
        timeout_s: float | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every rank; the answers by rank. `timeout_s` is for the ranks."""
        answers: list[Any] = await self.utility("collective_rpc", method, timeout_s, list(args), kwargs)
        return answers

    async def close(self) -> None:
        """Leave. Requests are aborted; a launched engine ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_reading()
        self._session.fail(EngineDeadError("this client was closed"))
        self._tell_outputs()
        if self._ending is not None:
            await self._ending
        await asyncio.shield(asyncio.to_thread(self._connection.close))

    async def __aenter__(self) -> AsyncEngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
        self._connection.send(frames)
        return request_id

    def _read_all(self) -> None:
        """Take in every message that has come: the descriptor will not tell of them again."""
        read, feed = self._connection.outputs.recv_multipart, self._session.feed
        self._last_heard_s, self._warn_after_s = self._clock.monotonic(), WARN_AFTER_S
        try:
            while feed(read(zmq.NOBLOCK)):
                pass
        except zmq.Again:
            pass
        except ProtocolError as error:
            self._session.fail(EngineDeadError(f"it sent a message that is none: {error}"))
        else:
            self._engine_ended()
        self._tell_outputs()

    def _check_silence(self) -> None:
        """Say who is waited for, if somebody waits and nothing comes."""
        now = self._clock.monotonic()
        silent_s = now - self._last_heard_s
        if not self._session.is_awaited:
            self._last_heard_s = now
        elif silent_s >= self._warn_after_s:
            self._connection.warn_of_silence(silent_s)
            self._warn_after_s = 2 * silent_s  # ever more rarely
        self._silence_check = self._loop.call_later(WARN_AFTER_S, self._check_silence)

    def _tell_outputs(self) -> None:
        if self._output_came is not None:
            if not self._output_came.done():
                self._output_came.set_result(None)
            self._output_came = None

    def _engine_ended(self) -> None:
        """The stream has something, or the engine has said that it is dead."""
        if self._ending is None:
            self._loop.remove_reader(self._stream_fd)
            self._ending = self._loop.create_task(self._hear_last_word())

    async def _hear_last_word(self) -> None:
        last_word = await asyncio.to_thread(self._connection.last_word)
        if not self._closed:
            self._read_all()  # what the engine sent before it ended
            if not last_word.crashed:
                await self._await_last_outputs()
        if not self._closed:
            self._stop_reading()
        self._session.fail(EngineDeadError(last_word.cause))
        self._tell_outputs()

    async def _await_last_outputs(self) -> None:
        """They may come by another way than the last word, and later."""
        deadline = self._clock.monotonic() + LAST_OUTPUTS_TIMEOUT_S
        while self._session.num_live and not self._closed and self._clock.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _stop_reading(self) -> None:
        self._silence_check.cancel()
        self._loop.remove_reader(self._outputs_fd)
        self._loop.remove_reader(self._stream_fd)


class Opening:
    """A client that is being opened: await it, or use it with `async with`."""

    def __init__(self, open_connection: Callable[[Callable[[Connection], None]], Connection]) -> None:
        self._open_connection = open_connection
        self._client: AsyncEngineClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncEngineClient]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncEngineClient:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _open(self) -> AsyncEngineClient:
        begun: list[Connection] = []
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_connection, begun.append))
        try:
            connection = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be cancelled, but what it waits for can be taken away.
            for connection in begun:
                connection.interrupt()
            opening.add_done_callback(_close_unwanted)
            raise
        return AsyncEngineClient(connection)


def _close_unwanted(opening: asyncio.Future[Connection]) -> None:
    # Cancelled as well if the loop is ending; what had begun has been interrupted.
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class _Stream:
    __slots__ = ("_error", "_loop", "_waiter", "outputs")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDeadError | None = None

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._wake()

    async def next(self) -> RequestOutput:
        while not self.outputs:
            if self._error is not None:
                raise EngineDeadError(self._error.cause)
            self._waiter = self._loop.create_future()
            await self._waiter
        return self.outputs.popleft()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Call:
    __slots__ = ("future", "method")

    def __init__(self, method: str, loop: asyncio.AbstractEventLoop) -> None:
        self.method = method
        self.future: asyncio.Future[Any] = loop.create_future()

    def answer(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: EngineDeadError | UtilityError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
