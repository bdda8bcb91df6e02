"""Which calls by name have changed the ranks for good, so that ranks that take their place can be changed
likewise.

Sleeping, adapters and updates of the weights are known by their names. Other methods are the worker author's:
what they change is lost with the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from executor.step import LoRARequest

_SLEEP = {"sleep", "release_kv_cache", "wake_up"}
_ADAPTERS = {"add_lora", "pin_lora", "remove_lora"}
_WEIGHTS = "update_weights"


class LastingCall(NamedTuple):
    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class LastingCalls:
    """Those that still matter: a call that undoes another one takes its place or removes it."""

    def __init__(self) -> None:
        self._sleep: list[LastingCall] = []
        self._weights: list[LastingCall] = []  # each may build on the one before
        self._adapters: list[LastingCall] = []
        self.lost: str | None = None  # a method whose effect cannot be had again

    def record(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """All ranks have done this call."""
        call = LastingCall(method, args, kwargs)
        if method == _WEIGHTS:
            self._record_update(call)
        elif method in _SLEEP:
            self._record_sleep(call)
        elif method in _ADAPTERS:
            self._record_adapter(call)

    def __iter__(self) -> Iterator[LastingCall]:
        return iter([*self._weights, *self._adapters, *self._sleep])

    def _record_update(self, call: LastingCall) -> None:
        """Arrays are not kept, and what has other arguments than the engine's is for others to repeat."""
        if len(call.args) != 1 or call.kwargs or _holds_array(call.args[0]):
            self.lost = call.method
        else:
            self._weights.append(call)

    def _record_sleep(self, call: LastingCall) -> None:
        tags = call.args[0] if call.args else call.kwargs.get("tags")
        if call.method != "wake_up":
            self._sleep = [call]
        elif not self._sleep or tags is None:
            self._sleep = []
        else:
            self._sleep.append(call)

    def _record_adapter(self, call: LastingCall) -> None:
        lora_id = _lora_id(call)
        if call.method != "pin_lora":
            self._adapters = [other for other in self._adapters if _lora_id(other) != lora_id]
        if call.method != "remove_lora":
            self._adapters.append(call)


def _holds_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_array, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_array, value))
    return isinstance(value, np.ndarray)


def _lora_id(call: LastingCall) -> Any:
    """Of the adapter that a call is about; it is given in full when it is added."""
    subject = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    if isinstance(subject, LoRARequest):
        return subject.int_id
    if isinstance(subject, Sequence) and not isinstance(subject, str) and len(subject) > 1:
        return subject[1]
    return subject
