"""Which calls by name have changed the ranks for good, so that ranks that take their place can be changed
likewise.

Sleeping and adapters are known by their names. Other methods are the worker author's: what they change is
lost with the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from executor.step import LoRARequest

_SLEEP = {"sleep", "wake_up"}
_ADAPTERS = {"add_lora", "pin_lora", "remove_lora"}
_CANNOT_BE_REPEATED = "update_weights"  # the weights are not kept


class LastingCall(NamedTuple):
    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class LastingCalls:
    """Those that still matter: a call that undoes another one takes its place or removes it."""

    def __init__(self) -> None:
        self._sleep: list[LastingCall] = []
        self._adapters: list[LastingCall] = []
        self.lost: str | None = None  # a method whose effect cannot be had again

    def record(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """All ranks have done this call."""
        call = LastingCall(method, args, kwargs)
        if method == _CANNOT_BE_REPEATED:
            self.lost = method
        elif method in _SLEEP:
            self._record_sleep(call)
        elif method in _ADAPTERS:
            self._record_adapter(call)

    def __iter__(self) -> Iterator[LastingCall]:
        return iter([*self._adapters, *self._sleep])

    def _record_sleep(self, call: LastingCall) -> None:
        tags = call.args[0] if call.args else call.kwargs.get("tags")
        if call.method == "sleep":
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


def _lora_id(call: LastingCall) -> Any:
    """Of the adapter that a call is about; it is given in full when it is added."""
    subject = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    if isinstance(subject, LoRARequest):
        return subject.int_id
    if isinstance(subject, Sequence) and not isinstance(subject, str) and len(subject) > 1:
        return subject[1]
    return subject
