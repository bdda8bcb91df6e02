"""Sends the requests of a trace to an engine at their times, and records what comes back and when."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_core.errors import EngineDeadError, RequestError
from engine_core.protocol import EngineCoreEvent, EventType
from engine_core.replay.traces import TraceRequest
from executor.sampling_params import SamplingParams
from transport.clock import SYSTEM_CLOCK, Clock


class Output(Protocol):
    """One delta of a request's output."""

    @property
    def new_token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def num_cached_tokens(self) -> int | None: ...
    @property
    def events(self) -> Sequence[EngineCoreEvent] | None: ...


class Engine(Protocol):
    """What a replay needs of a client."""

    def generate(
        self, prompt_token_ids: npt.NDArray[np.int32], params: SamplingParams
    ) -> AsyncIterator[Output]: ...


@dataclass(slots=True)
class Record:
    """What became of one request. Times are the clock's, in seconds."""

    request: TraceRequest
    sent_s: float
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    arrived_s: array[float] = field(default_factory=lambda: array("d"))  # one for each token
    num_cached_tokens: int = 0
    num_preemptions: int | None = None  # None: the engine does not report events
    finish_reason: str | None = None  # None: still running when the replay ended
    failure: str | None = None

    @property
    def completed(self) -> bool:
        return self.finish_reason == "length" and len(self.token_ids) == self.request.output_length


class Replay:
    """One run of a trace. `records` grows while it runs and may be read at any time.

    Requests leave in the order of the trace, each at its arrival time divided by `speed`, or later if
    `max_concurrency` requests are still unanswered. Every request gets exactly its recorded output length.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[TraceRequest],
        *,
        vocab_size: int,
        speed: float = 1.0,
        max_concurrency: int | None = None,
        on_progress: Callable[[Replay], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.requests = requests
        self.records: list[Record] = []
        self.num_done = 0
        self.num_output_tokens = 0
        self.started_s = clock.monotonic()
        self._engine = engine
        self._vocab_size = vocab_size
        self._speed = speed
        self._seats = asyncio.Semaphore(max_concurrency or len(requests))
        self._on_progress = on_progress
        self._clock = clock

    async def run(self) -> None:
        """Until every request is answered. Raises EngineDeadError; cancelling it aborts what is running."""
        self.started_s = self._clock.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) and not failed.done():
                failed.set_exception(error)

        sender = asyncio.ensure_future(self._send(tasks, done))
        try:
            await asyncio.wait({sender, failed}, return_when=asyncio.FIRST_COMPLETED)
            while tasks and not failed.done():
                await asyncio.wait({*tasks, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            await sender
        finally:
            for task in (sender, failed, *tasks):
                task.cancel()
            await asyncio.gather(sender, *tasks, return_exceptions=True)

    async def _send(self, tasks: set[asyncio.Task[None]], done: Callable[[asyncio.Task[None]], None]) -> None:
        for request in self.requests:
            due_s = self.started_s + request.arrival_s / self._speed
            prompt = request.prompt(self._vocab_size)
            await self._seats.acquire()
            await asyncio.sleep(max(0.0, due_s - self._clock.monotonic()))
            task = asyncio.ensure_future(self._serve(request, prompt))
            tasks.add(task)
            task.add_done_callback(done)

    async def _serve(self, request: TraceRequest, prompt: npt.NDArray[np.int32]) -> None:
        # No eos_token_id: the recorded length decides, whatever is sampled.
        params = SamplingParams(temperature=0.0, max_tokens=request.output_length)
        record = Record(request, self._clock.monotonic())
        self.records.append(record)
        try:
            async for output in self._engine.generate(prompt, params):
                self._note(record, output)
        except RequestError as error:
            record.finish_reason = "error"
            record.failure = f"{error.code}: {error.message}"
        except EngineDeadError as error:
            record.finish_reason = "error"
            record.failure = str(error)
            raise
        finally:
            self._seats.release()
        self.num_done += 1
        if self._on_progress:
            self._on_progress(self)

    def _note(self, record: Record, output: Output) -> None:
        now_s = self._clock.monotonic()
        count = len(output.new_token_ids)
        record.token_ids.extend(output.new_token_ids)
        record.arrived_s.extend([now_s] * count)
        self.num_output_tokens += count
        if output.num_cached_tokens is not None:
            record.num_cached_tokens = output.num_cached_tokens
        if output.events is not None:
            preempted = sum(event.type is EventType.PREEMPTED for event in output.events)
            record.num_preemptions = (record.num_preemptions or 0) + preempted
        if output.finish_reason is not None:
            record.finish_reason = output.finish_reason
            if not record.completed:
                wanted = record.request.output_length
                record.failure = (
                    f"ended by {output.finish_reason} after {len(record.token_ids)} of {wanted} tokens"
                )
        if self._on_progress:
            self._on_progress(self)
