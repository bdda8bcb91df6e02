"""Utility calls: how front ends call methods of the engine by name.

`@utility` makes a method of a `UtilityMethods` class callable. Its signature is its contract: the number and
types of arguments are checked against it, and a failure is answered with vLLM's text. Arrays among the
arguments travel in frames of their own. A method that cannot answer yet returns a `Deferred`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, get_type_hints

import msgspec

from engine_core.logs import BoundedWarnings
from engine_core.protocol import UtilityOutput, UtilityRequest
from engine_core.wire import Frame, decode_array

logger = logging.getLogger("engine_core")

Method = TypeVar("Method", bound=Callable[..., Any])
Reply = Callable[[UtilityOutput], None]


class Deferred:
    """An answer to come. Whoever is interested may ask before or after it is there, but only one may."""

    def __init__(self) -> None:
        self._on_done: Callable[[Any, Exception | None], None] | None = None
        self._result: tuple[Any, Exception | None] | None = None

    def when_done(self, callback: Callable[[Any, Exception | None], None]) -> None:
        if self._result is not None:
            callback(*self._result)
        else:
            self._on_done = callback

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        self._result = (value, error)
        if self._on_done is not None:
            self._on_done(value, error)

    def settle(self, action: Callable[[], Any]) -> None:
        """Resolve to what `action` returns or raises."""
        try:
            value = action()
        except Exception as error:  # belongs to whoever waits for the answer
            self.resolve(error=error)
        else:
            self.resolve(value)

    def then(self, action: Callable[[], Any]) -> Deferred:
        """`action`'s outcome, once this is done without an error; else this one's error."""
        following = Deferred()

        def done(value: Any, error: Exception | None) -> None:
            if error is None:
                following.settle(action)
            else:
                following.resolve(error=error)

        self.when_done(done)
        return following


def utility(method: Method) -> Method:
    """Callable by name from a front end."""
    method.__utility__ = True  # type: ignore[attr-defined]
    return method


class UtilityMethods:
    """Base of classes with such methods. For one thread."""

    def __init__(self) -> None:
        self.caller = ""  # who has called the method that runs
        self._warn = BoundedWarnings(logger).warn
        self._methods = {
            name: _Signature(getattr(self, name))
            for name in dir(type(self))
            if getattr(getattr(type(self), name), "__utility__", False)
        }

    def call(
        self, request: UtilityRequest, reply: Reply, caller: str = "", frames: Sequence[Frame] = ()
    ) -> None:
        """Run a method and reply, now or when its answer is there. Never raises for the method's sake.

        `frames`: those of the message, which hold its arrays.
        """

        def done(value: Any, error: Exception | None) -> None:
            self.called()
            if error is None:
                reply(UtilityOutput(request.call_id, None, (None, value)))
            else:
                self._warn("utility call %s failed: %s", request.method, error)
                reply(UtilityOutput(request.call_id, f"Call to {request.method} method failed: {error}"))

        self.caller = caller
        try:
            signature = self._methods.get(request.method)
            if signature is None:
                raise AttributeError(f"there is no utility method {request.method!r:.100}")
            result = signature.call(request.args, frames)
        except Exception as error:  # whatever a method raises is its caller's answer
            done(None, error)
        else:
            if isinstance(result, Deferred):
                result.when_done(done)
            else:
                done(result, None)

    def called(self) -> None:
        """A call is about to be answered."""


class _Signature:
    """A method with its arguments' names and types."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        hints = get_type_hints(method)
        self._parameters = [(p, hints[p.name]) for p in inspect.signature(method).parameters.values()]

    def call(self, args: list[Any], frames: Sequence[Frame]) -> Any:
        """Raises TypeError for arguments that do not fit."""
        name, most = self._method.__name__, len(self._parameters)
        if len(args) > most:
            raise TypeError(f"{name} takes at most {most} arguments, {len(args)} were given")
        required = [p.name for p, _ in self._parameters[len(args) :] if p.default is p.empty]
        if required:
            raise TypeError(f"{name} lacks the argument {required[0]}")
        return self._method(*[_fit(arg, *self._parameters[i], frames) for i, arg in enumerate(args)])


def _fit(value: Any, parameter: inspect.Parameter, type_: Any, frames: Sequence[Frame]) -> Any:
    try:
        return msgspec.convert(value, type_, dec_hook=partial(_array, frames))
    except msgspec.ValidationError as error:
        raise TypeError(f"argument {parameter.name}: {str(error).replace('`', '')}") from None


def _array(frames: Sequence[Frame], type_: type, value: Any) -> Any:
    return decode_array(value, frames)
