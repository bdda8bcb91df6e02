"""Utility calls: what front ends ask of the engine besides generation.

`@utility` makes a method of `EngineControl` callable by name. Its signature is its contract: the number and
types of arguments are checked against it, and a failure is answered with vLLM's text. A method that cannot
answer yet returns a `Deferred`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from engine_core.core import EngineCore
from engine_core.outputs import StepOutputs, finish_outputs
from engine_core.protocol import FinishReason, UtilityOutput, UtilityRequest
from engine_core.scheduler.explain import explain
from engine_core.scheduler.scheduler import PauseState

logger = logging.getLogger("engine_core")

PauseMode = Literal["abort", "wait", "keep"]
Method = TypeVar("Method", bound=Callable[..., Any])
Reply = Callable[[UtilityOutput], None]
WAKE_TAGS = ("weights", "kv_cache")


class Deferred:
    """An answer to come."""

    def __init__(self) -> None:
        self._on_done: Callable[[Any, Exception | None], None] | None = None

    def when_done(self, callback: Callable[[Any, Exception | None], None]) -> None:
        self._on_done = callback

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        if self._on_done is not None:
            self._on_done(value, error)


def utility(method: Method) -> Method:
    """Callable by name from a front end."""
    method.__utility__ = True  # type: ignore[attr-defined]
    return method


class EngineControl:
    """The methods, and the state that they set. All of it belongs to the thread of the step loop.

    `emit(outputs)` sends outputs that no step has made.
    """

    def __init__(self, core: EngineCore, emit: Callable[[StepOutputs], None]) -> None:
        self._core = core
        self._emit = emit
        self.rejects_new_requests = False  # paused by a user who does not want them queued
        self.weight_version = "default"
        self._asleep: set[str] = set()  # of WAKE_TAGS
        self._when_idle: list[Callable[[], None]] = []
        self._methods = {
            name: _Signature(getattr(self, name))
            for name, function in vars(type(self)).items()
            if getattr(function, "__utility__", False)
        }

    def call(self, request: UtilityRequest, reply: Reply) -> None:
        """Run a method and reply, now or when its answer is there. Never raises for the method's sake."""

        def done(value: Any, error: Exception | None) -> None:
            if error is None:
                reply(UtilityOutput(request.call_id, None, (None, value)))
            else:
                logger.warning("utility call %s failed: %s", request.method, error)
                reply(UtilityOutput(request.call_id, _failure(request.method, error)))

        try:
            signature = self._methods.get(request.method)
            if signature is None:
                raise AttributeError(f"there is no utility method {request.method!r:.100}")
            result = signature.call(request.args)
        except Exception as error:  # whatever a method raises is its caller's answer
            done(None, error)
        else:
            if isinstance(result, Deferred):
                result.when_done(done)
            else:
                done(result, None)

    def notify_idle(self) -> None:
        """The step loop has run dry."""
        while self._when_idle:
            self._when_idle.pop(0)()

    @property
    def waits_for_idle(self) -> bool:
        return bool(self._when_idle)

    def abort_all(self) -> None:
        """End every request, with an output that says so."""
        self._emit(finish_outputs(self._core.scheduler.finish_requests(None, FinishReason.ABORT)))

    # What front ends call

    @utility
    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    @utility
    def reset_mm_cache(self) -> None:
        """There is no multi-modal input, hence no cache; vLLM's Python front end calls this at its start."""

    @utility
    def reset_encoder_cache(self) -> None:
        """As `reset_mm_cache`."""

    @utility
    def reset_prefix_cache(self, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """False while requests hold blocks, unless they may be preempted. There is no connector."""
        return self._core.reset_prefix_cache(reset_running)

    @utility
    def abort_requests(self, request_ids: list[str]) -> list[str]:
        """End requests; returns those that were live.

        The answer is sent after all outputs they had: no token of them follows it, and their blocks and slots
        are free.
        """
        return [request.request_id for request in self._core.abort_requests(request_ids)]

    @utility
    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Deferred | None:
        """As `pause_scheduler`; with "abort" and "wait" new requests are refused until `resume_scheduler`."""
        result = self.pause_scheduler(mode, clear_cache)
        self.rejects_new_requests = mode != "keep"
        return result

    @utility
    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Deferred | None:
        """Stop running requests; new ones queue. Answers when nothing runs any more.

        "abort" ends all requests, "wait" lets the running ones finish, "keep" freezes them.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"invalid pause mode {mode!r}: one of {', '.join(get_args(PauseMode))}")
        if mode == "abort":
            self.abort_all()
        self._core.scheduler.set_pause_state(
            PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        )
        return self._after_idle(lambda: self._clear_caches() if clear_cache else None)

    @utility
    def resume_scheduler(self) -> None:
        self.rejects_new_requests = False
        self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    @utility
    def is_scheduler_paused(self) -> bool:
        return self._core.scheduler.pause_state is not PauseState.UNPAUSED

    @utility
    def is_sleeping(self) -> bool:
        """Paused or asleep."""
        return self.is_scheduler_paused() or bool(self._asleep)

    @utility
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Deferred | None:
        """Level 0 pauses; 1 has the workers put weights aside and drop the KV cache; 2 has them drop both."""
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level {level} is not 0, 1 or 2")
        paused = self.pause_scheduler(mode, clear_cache=level > 0)
        if level == 0:
            return paused

        def put_to_sleep() -> None:
            if not self._asleep:
                self._core.executor.collective_rpc("sleep", args=(level,))
                self._asleep.update(WAKE_TAGS)

        if paused is None:
            put_to_sleep()
            return None
        slept = Deferred()

        def pause_done(value: Any, error: Exception | None) -> None:
            if error is None:
                _settle(slept, put_to_sleep)
            else:
                slept.resolve(error=error)

        paused.when_done(pause_done)
        return slept

    @utility
    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, for all or some of "weights", "kv_cache", "scheduling". True once fully awake."""
        unknown = set(tags or ()) - {*WAKE_TAGS, "scheduling"}
        if unknown:
            raise ValueError(f"unknown wake-up tags: {', '.join(sorted(unknown))}")
        wanted = None if tags is None else [tag for tag in tags if tag in WAKE_TAGS]
        if self._asleep and (wanted is None or wanted):
            self._core.executor.collective_rpc("wake_up", args=(wanted,))
            self._asleep.difference_update(WAKE_TAGS if wanted is None else wanted)
        if not self._asleep:
            self.resume_scheduler()
        return not self._asleep

    @utility
    def set_weight_version(self, weight_version: str) -> None:
        self.weight_version = weight_version

    @utility
    def get_weight_version(self) -> str:
        return self.weight_version

    @utility
    def get_counters(self) -> dict[str, int]:
        """Of the scheduler, since the start; whoever wants a rate compares two looks."""
        return {"steps": self._core.scheduler.num_executed_steps}

    @utility
    def explain(self, request_id: str) -> dict[str, Any]:
        """Where a live or lately ended request stands: an `Explanation` as a map."""
        answer: dict[str, Any] = msgspec.to_builtins(explain(self._core.scheduler, request_id))
        return answer

    @utility
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every rank; the answers by rank. `timeout` in seconds."""
        answers: list[Any] = self._core.executor.collective_rpc(method, timeout, args or (), kwargs)
        return answers

    @utility
    def profile(
        self,
        is_start: bool = True,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start or stop the workers' profilers."""
        if delay_iterations or max_iterations or profiler_kwargs:
            raise ValueError("the workers' profilers take a prefix and nothing else")
        self._core.executor.collective_rpc("profile", args=(is_start, prefix))

    # Helpers

    def _after_idle(self, action: Callable[[], None]) -> Deferred | None:
        """Run `action` once no step has anything to do; None if that was at once."""
        if not self._core.has_work:
            action()
            return None
        deferred = Deferred()
        self._when_idle.append(lambda: _settle(deferred, action))
        return deferred

    def _clear_caches(self) -> None:
        if not self._core.reset_prefix_cache(reset_running=True):
            raise RuntimeError("the prefix cache could not be reset: requests still hold blocks")


def _settle(deferred: Deferred, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # belongs to whoever waits for the answer
        deferred.resolve(error=error)
    else:
        deferred.resolve()


def _failure(method: str, error: Exception) -> str:
    return f"Call to {method} method failed: {error}"


class _Signature:
    """A method with its arguments' names and types."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        hints = get_type_hints(method)
        self._parameters = [(p, hints[p.name]) for p in inspect.signature(method).parameters.values()]

    def call(self, args: list[Any]) -> Any:
        """Raises TypeError for arguments that do not fit."""
        name, most = self._method.__name__, len(self._parameters)
        if len(args) > most:
            raise TypeError(f"{name} takes at most {most} arguments, {len(args)} were given")
        required = [p.name for p, _ in self._parameters[len(args) :] if p.default is p.empty]
        if required:
            raise TypeError(f"{name} lacks the argument {required[0]}")
        return self._method(*[_fit(arg, *self._parameters[i]) for i, arg in enumerate(args)])


def _fit(value: Any, parameter: inspect.Parameter, type_: Any) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise TypeError(f"argument {parameter.name}: {str(error).replace('`', '')}") from None
