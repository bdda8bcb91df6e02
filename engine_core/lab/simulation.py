"""Engines in virtual time: the real `EngineCore`, on workers that a latency model stands for.

Nothing sleeps and nothing else runs, so equal inputs give equal results to the last bit. A request that
arrives while an engine waits for its workers is taken in when the step is over, as by the engine process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from engine_core.config import EngineConfig
from engine_core.core import BATCH_QUEUE_SIZE, EngineCore
from engine_core.errors import RequestError
from engine_core.lab.latency import LatencyModel
from engine_core.lab.load import block_names
from engine_core.lab.metrics import Metrics, RequestResult, SimulationReport, Slo
from engine_core.lab.routing import RoundRobin, RoutingError, RoutingPolicy
from engine_core.lab.simulated_request import SimulatedRequest
from engine_core.lab.simulated_workers import SimulatedWorkers
from engine_core.lab.virtual_clock import VirtualClock
from engine_core.outputs import ClientOutputs
from engine_core.replay.traces import TraceRequest
from engine_core.validation import check_prompt_length
from executor.base import EngineCapacity


class SimulatedEngine:
    """One engine and its clock, which is ahead of the arrivals' while it has work."""

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        capacity: EngineCapacity,
        latency: LatencyModel,
        metrics: Metrics,
        on_result: Callable[[RequestResult], None],
    ) -> None:
        self.index = index
        self.clock = VirtualClock()
        self.workers = SimulatedWorkers(config.executor_config(), capacity, latency, self.clock)
        self.core = EngineCore(config, self.workers, self.clock)
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.live: dict[str, SimulatedRequest] = {}
        self._metrics = metrics
        self._on_result = on_result
        # When the router hears what: time, requests that ended, prompt tokens that got their first output.
        self._news: deque[tuple[float, int, int]] = deque()
        self._accounted_s = 0.0
        self._idle_steps = 0  # in a row, that led to nothing

    @property
    def has_work(self) -> bool:
        """Whether to call `step`. False for an engine that is stuck: only a new request can change that."""
        return self.core.has_work and self._idle_steps <= BATCH_QUEUE_SIZE

    # As the router sees it.

    def hear_until(self, now_s: float) -> None:
        """The router knows what was answered up to `now_s`."""
        while self._news and self._news[0][0] <= now_s:
            _, ended, prompt_tokens = self._news.popleft()
            self.num_requests -= ended
            self.num_prompt_tokens -= prompt_tokens

    def cached_tokens(self, request: TraceRequest) -> int:
        kv = self.core.scheduler.kv
        if kv.hasher is None:
            return 0
        most = (request.input_length - 1) // kv.block_size
        return len(kv.pool.find(block_names(request, kv.block_size), most)) * kv.block_size

    # As the simulation drives it.

    def receive(self, source: TraceRequest) -> None:
        """A request arrives. It is refused if it can never fit, or if the engine holds too many."""
        if not self.core.has_work:
            self.clock.advance_to(source.arrival_s)
            self._accounted_s = self.clock.monotonic()
        request = SimulatedRequest(source)
        try:
            check_prompt_length(source.input_length, self.core.scheduler.limits)
        except RequestError as error:
            self._metrics.refused += 1
            self._refuse(request, error)
            return
        try:
            self.core.add_request(request)
        except RequestError as error:
            self._refuse(request, error)
            return
        self._idle_steps = 0
        self.live[request.request_id] = request
        self.num_requests += 1
        self.num_prompt_tokens += source.input_length

    def _refuse(self, request: SimulatedRequest, error: RequestError) -> None:
        self._metrics.fail(f"{error.code}: {error.message}")
        self._on_result(self._metrics.ended(request, self.index, "error"))

    def step(self) -> None:
        before = self.workers.num_steps
        running, waiting = self.core.scheduler.num_running, self.core.scheduler.num_waiting
        outputs = self.core.step_fn().get(0)
        if outputs is None and self.workers.num_steps == before:
            self._idle_steps += 1
        else:
            self._idle_steps = 0
        self._account(running, waiting)
        num_outputs = 0
        if outputs is not None:
            self._take_in(outputs)
            num_outputs = len(outputs.requests) + len(outputs.outputs)
        self._metrics.tokens(self.clock.monotonic(), self.workers.take_prefill_tokens(), num_outputs)

    def _account(self, running: int, waiting: int) -> None:
        """Book the time since the last step."""
        metrics, now_s = self._metrics, self.clock.monotonic()
        usage = self.core.scheduler.kv.pool.usage
        metrics.timeline.spread(self._accounted_s, now_s, (running, waiting, usage))
        metrics.kv_usage_peak = max(metrics.kv_usage_peak, usage)
        metrics.waiting_peak = max(metrics.waiting_peak, waiting)
        metrics.last_s = max(metrics.last_s, now_s)
        self._accounted_s = now_s

    def _take_in(self, outputs: ClientOutputs) -> None:
        now_s = self.clock.monotonic()
        tokens_since: dict[float, int] = {}  # by the time of the token before
        for request in cast("list[SimulatedRequest]", outputs.requests):
            request.num_output_tokens += 1
            tokens_since[request.last_s] = tokens_since.get(request.last_s, 0) + 1
            request.last_s = now_s
        for output in outputs.outputs:
            request = self.live[output.request_id]
            if request.num_output_tokens:
                tokens_since[request.last_s] = tokens_since.get(request.last_s, 0) + 1
            else:
                request.first_s = now_s
                self._metrics.first_token(request, now_s)
                self._news.append((now_s, 0, request.num_prompt_tokens))
            request.num_output_tokens += 1
            request.last_s = now_s
            if output.finish_reason is not None:
                del self.live[output.request_id]
                self._news.append((now_s, 1, 0))
                self._on_result(self._metrics.ended(request, self.index, str(output.finish_reason)))
        for last_s, count in tokens_since.items():
            self._metrics.gaps(now_s - last_s, count)

    def give_up(self) -> None:
        """No further request comes: what is left never runs."""
        for request in self.live.values():
            self._on_result(self._metrics.ended(request, self.index, "unfinished"))
        self.live.clear()


class Simulation:
    """A load on engines of one configuration. `run` it once, then ask for its `report`."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: EngineCapacity,
        latency: LatencyModel,
        *,
        num_engines: int = 1,
        routing: RoutingPolicy | None = None,
        slo: Slo | None = None,
        on_result: Callable[[RequestResult], None] = lambda result: None,
    ) -> None:
        """`capacity` is each engine's; `routing` is round robin by default. `on_result` hears of each request
        when it ends. Raises `ConfigError`."""
        self.metrics = Metrics(slo or Slo())
        self.engines = [
            SimulatedEngine(index, config, capacity, latency, self.metrics, on_result)
            for index in range(num_engines)
        ]
        self._routing = routing or RoundRobin()

    def run(self, load: Iterable[TraceRequest]) -> None:
        """Until every request of `load`, which is in order of arrival, has its answer, or can have none.

        Raises `LatencyError` and `RoutingError` if a user's model or policy misbehaves.
        """
        arrivals = iter(load)
        arrival = next(arrivals, None)
        while True:
            working = [engine for engine in self.engines if engine.has_work]
            engine = min(working, key=lambda engine: engine.clock.monotonic()) if working else None
            if arrival is not None and (engine is None or arrival.arrival_s <= engine.clock.monotonic()):
                self._arrive(arrival)
                arrival = next(arrivals, None)
            elif engine is not None:
                engine.step()
            else:
                break
        for engine in self.engines:
            engine.give_up()

    def _arrive(self, request: TraceRequest) -> None:
        metrics = self.metrics
        metrics.requests += 1
        metrics.prompt_tokens += request.input_length
        metrics.last_s = max(metrics.last_s, request.arrival_s)
        chosen = 0
        if len(self.engines) > 1:
            for engine in self.engines:
                engine.hear_until(request.arrival_s)
            chosen = self._route(request)
        self.engines[chosen].receive(request)

    def _route(self, request: TraceRequest) -> int:
        try:
            chosen = self._routing.route(request, self.engines)
        except Exception as error:  # the user's code
            name = type(self._routing).__name__
            raise RoutingError(
                f"routing policy {name} raised {type(error).__name__}: {error}, for {request}"
            ) from error
        if not (isinstance(chosen, int) and 0 <= chosen < len(self.engines)):
            raise RoutingError(f"the routing policy chose engine {chosen!r} of {len(self.engines)}")
        return chosen

    def report(
        self, latency_model: str, unbounded_hits: int | None = None, skipped_lines: int = 0
    ) -> SimulationReport:
        """`latency_model` is how the model was asked for; `unbounded_hits` the prefix-hit tokens of a cache
        that never evicts."""
        return self.metrics.report(
            engines=len(self.engines),
            engine_steps=sum(engine.workers.num_steps for engine in self.engines),
            busy_s=sum(engine.workers.busy_s for engine in self.engines),
            latency_model=latency_model,
            unbounded_hits=unbounded_hits,
            skipped_lines=skipped_lines,
        )
