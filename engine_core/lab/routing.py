"""Which of several engines serves a request. A policy is a small class; `parse_routing` finds it by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from engine_core.replay.traces import TraceRequest
from executor.imports import import_object


class RoutingError(ValueError):
    """A routing policy cannot be had, or chose an engine that is none."""


class EngineView(Protocol):
    """What a router can know of an engine at the time a request arrives."""

    @property
    def index(self) -> int: ...

    @property
    def num_requests(self) -> int:
        """Requests sent to it that are not answered in full."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of requests sent to it that have no output yet."""
        ...

    def cached_tokens(self, request: TraceRequest) -> int:
        """Tokens at the start of the prompt whose KV it has."""
        ...


class RoutingPolicy(ABC):
    """May keep state; sees every request once, in order of arrival. Ties are best broken by index, so that
    a simulation stays repeatable."""

    @abstractmethod
    def route(self, request: TraceRequest, engines: Sequence[EngineView]) -> int:
        """The index of the engine that gets the request."""


class RoundRobin(RoutingPolicy):
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: TraceRequest, engines: Sequence[EngineView]) -> int:
        chosen = self._next
        self._next = (chosen + 1) % len(engines)
        return chosen


class LeastLoaded(RoutingPolicy):
    """The one with the fewest unanswered requests."""

    def route(self, request: TraceRequest, engines: Sequence[EngineView]) -> int:
        return min(engines, key=lambda engine: (engine.num_requests, engine.index)).index


class PrefixAware(RoutingPolicy):
    """The one that has the least to compute until the first token: the prompts that wait there, and of this
    one what is not cached."""

    def route(self, request: TraceRequest, engines: Sequence[EngineView]) -> int:
        return min(
            engines,
            key=lambda engine: (
                engine.num_prompt_tokens - engine.cached_tokens(request),
                engine.num_requests,
                engine.index,
            ),
        ).index


ROUTING_POLICIES: dict[str, type[RoutingPolicy]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def parse_routing(name: str) -> RoutingPolicy:
    """A new policy object, by name or as `package.module:Class`. Raises `RoutingError`."""
    if name in ROUTING_POLICIES:
        return ROUTING_POLICIES[name]()
    if ":" not in name:
        raise RoutingError(
            f"there is no routing policy {name!r}; there are {', '.join(ROUTING_POLICIES)} and "
            "package.module:Class"
        )
    found = import_object(name, lambda reason: RoutingError(f"{name}: {reason}"))
    if not (isinstance(found, type) and issubclass(found, RoutingPolicy)):
        raise RoutingError(f"{name} is not a subclass of engine_core.lab.routing.RoutingPolicy")
    return found()
