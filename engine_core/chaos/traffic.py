"""Requests that check what comes back: tokens against the mock's model, ends against what was due."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine_core.async_client import AsyncEngineClient
from engine_core.errors import EngineDeadError, RequestError
from engine_core.replay.traces import TraceRequest
from executor.mock_model import mock_tokens
from executor.sampling_params import SamplingParams
from transport.clock import SYSTEM_CLOCK, Clock

Tokens = npt.NDArray[np.int32]

_LONGEST_PROMPT = 2000
_LONGEST_OUTPUT = 64
_NUM_STEMS = 8


def generated(rng: random.Random, vocab_size: int) -> Iterator[tuple[Tokens, int]]:
    """Prompts and output lengths without end; some prompts share their beginning."""
    stems = [_random_tokens(rng, rng.randint(16, 400), vocab_size) for _ in range(_NUM_STEMS)]
    while True:
        own = _random_tokens(rng, rng.randint(1, 200), vocab_size)
        prompt = np.concatenate((rng.choice(stems), own)) if rng.random() < 0.5 else own
        yield prompt, rng.randint(1, _LONGEST_OUTPUT)


def recorded(trace: Sequence[TraceRequest], vocab_size: int) -> Iterator[tuple[Tokens, int]]:
    """Those of a trace over and over, cut to lengths that get through between two faults."""
    while True:
        for request in trace:
            yield request.prompt(vocab_size)[:_LONGEST_PROMPT], min(request.output_length, _LONGEST_OUTPUT)


def _random_tokens(rng: random.Random, count: int, vocab_size: int) -> Tokens:
    return np.array([rng.randrange(vocab_size) for _ in range(count)], np.int32)


@dataclass(slots=True)
class Window:
    """From a fault until it is over: the longest time in which nothing came from the engine."""

    opened_s: float
    silence_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    sent: int = 0
    completed: int = 0  # every token right, and the right number of them
    aborted: int = 0  # by us
    convicted: int = 0  # poisonous ones that ended with the worker's error
    lost: int = 0  # ended in another way than they should have
    wrong_tokens: int = 0
    tokens: int = 0
    complaints: list[str] = field(default_factory=list)


class Traffic:
    """Keeps `concurrency` requests in flight until told to stop."""

    def __init__(
        self,
        client: AsyncEngineClient,
        source: Iterator[tuple[Tokens, int]],
        concurrency: int,
        vocab_size: int,
        logprobs: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`logprobs` makes every output that much larger."""
        self.tally = Tally()
        self.error: BaseException | None = None  # what ended a request that has nothing to do with it
        self._client = client
        self._source = source
        self._concurrency = concurrency
        self._vocab_size = vocab_size
        self._logprobs = logprobs
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: set[str] = set()
        self._aborted: set[str] = set()
        self._last_output_s = clock.monotonic()
        self._windows: list[Window] = []
        self._stopping = False

    def start(self) -> None:
        self._stopping = False
        for _ in range(self._concurrency):
            self._spawn(self._keep_sending())

    async def stop(self) -> None:
        """Let what is in flight end. Raises `error` if there is one."""
        self._stopping = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.error is not None:
            raise self.error

    def open_window(self) -> Window:
        window = Window(self._clock.monotonic())
        self._windows.append(window)
        return window

    def close_window(self, window: Window) -> float:
        """Returns the longest silence in it, in seconds."""
        self._note_silence()
        self._windows.remove(window)
        return window.silence_s

    async def probe(self) -> None:
        """A request of its own: returns with its first token."""
        prompt, _ = next(self._source)
        await self._serve(prompt, 1, request_id=None)

    async def poison(self, request_id: str) -> None:
        """A request that makes a worker fail; it must end with the worker's error."""
        prompt, _ = next(self._source)
        tally = self.tally
        tally.sent += 1
        try:
            async for output in self._client.generate(
                prompt, SamplingParams(max_tokens=4), request_id=request_id
            ):
                if output.finished:
                    self._complain(f"{request_id} ended with {output.finish_reason}, not with an error")
        except RequestError as error:
            if error.code == "worker_error":
                tally.convicted += 1
            else:
                self._complain(f"{request_id} ended with {error.code}: {error.message}")

    async def abort_one(self, rng: random.Random) -> bool:
        """Abort a request that runs; after that, nothing may come of it. False if none runs."""
        alive = [request_id for request_id in self._live if request_id not in self._aborted]
        if not alive:
            return False
        request_id = rng.choice(sorted(alive))
        self._aborted.add(request_id)
        await self._client.abort(request_id)
        return True

    async def _keep_sending(self) -> None:
        while not self._stopping:
            prompt, length = next(self._source)
            await self._serve(prompt, length, request_id=f"chaos-{self.tally.sent}")

    async def _serve(self, prompt: Tokens, length: int, request_id: str | None) -> None:
        tally = self.tally
        tally.sent += 1
        received: list[int] = []
        reason = None
        if request_id is not None:
            self._live.add(request_id)
        try:
            params = SamplingParams(max_tokens=length, logprobs=self._logprobs)
            async for output in self._client.generate(prompt, params, request_id=request_id):
                self._note_silence()
                received += output.new_token_ids
                reason = output.finish_reason
        except RequestError as error:
            reason = f"{error.code}: {error.message}"
        except EngineDeadError:
            reason = "the engine died"
            raise
        finally:
            self._judge(prompt, length, received, reason, request_id)

    def _judge(
        self, prompt: Tokens, length: int, received: list[int], reason: str | None, request_id: str | None
    ) -> None:
        tally = self.tally
        tally.tokens += len(received)
        right = mock_tokens(prompt, len(received), self._vocab_size)
        wrong = int(np.count_nonzero(right != np.array(received, np.int32)))
        tally.wrong_tokens += wrong
        was_aborted = request_id in self._aborted
        if request_id is not None:
            self._live.discard(request_id)
            self._aborted.discard(request_id)
        if wrong:
            self._complain(f"{request_id}: {wrong} of {len(received)} tokens are wrong")
        elif reason == "length" and len(received) == length:
            tally.completed += 1
        elif reason == "abort" and was_aborted:
            tally.aborted += 1
        else:
            self._complain(f"{request_id} ended after {len(received)} of {length} tokens: {reason}")

    def _complain(self, text: str) -> None:
        self.tally.lost += 1
        self.tally.complaints.append(text)

    def _note_silence(self) -> None:
        now = self._clock.monotonic()
        for window in self._windows:
            window.silence_s = max(window.silence_s, now - max(self._last_output_s, window.opened_s))
        self._last_output_s = now

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self.error is None:
            self.error = error
