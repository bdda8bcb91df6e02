"""A scheduler that somebody watches: whatever changes its state is reported, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from engine_core.errors import RequestError
from engine_core.outputs import StepOutputs
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.step import ModelRunnerOutput, SchedulerOutput


class SchedulerObserver(Protocol):
    """Hears of each call before the scheduler acts on it, and of decisions after they are made.

    Arrays of steps may be kept, those of worker outputs not. Nothing may raise or block.
    """

    def attached(self, scheduler: Scheduler) -> None:
        """Called once, first. `scheduler` may be read whenever something is reported."""
        ...

    def arrived(self, request: Request) -> None: ...
    def refused(self, request: Request, error: RequestError) -> None:
        """The request that arrived last was not taken."""
        ...

    def finished(self, request_ids: list[str] | None, reason: FinishReason) -> None:
        """From outside; None: all requests."""
        ...

    def planned(self, step: SchedulerOutput) -> None: ...
    def answered(self, output: ModelRunnerOutput) -> None: ...
    def pause_state_set(self, state: PauseState) -> None: ...
    def limits_set(self, max_running: int, budget: int) -> None: ...
    def prefix_cache_reset(self, reset_running: bool) -> None: ...
    def restarted(self) -> None: ...
    def allowed_only(self, request_ids: list[str] | None) -> None:
        """None: everybody may run."""
        ...


def observed(scheduler_cls: type[Scheduler], observer: SchedulerObserver) -> type[Scheduler]:
    """`scheduler_cls`, whose instances report to `observer`. What a method calls in turn is not reported."""

    class Observed(scheduler_cls):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            observer.attached(self)

        def add_request(self, request: Request) -> None:
            observer.arrived(request)
            try:
                super().add_request(request)
            except RequestError as error:
                observer.refused(request, error)
                raise

        def finish_requests(self, request_ids: Iterable[str] | None, reason: FinishReason) -> list[Request]:
            ids = None if request_ids is None else list(request_ids)
            if ids != []:
                observer.finished(ids, reason)
            ended: list[Request] = super().finish_requests(ids, reason)
            return ended

        def schedule(self) -> SchedulerOutput:
            step: SchedulerOutput = super().schedule()
            observer.planned(step)
            return step

        def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> StepOutputs:
            observer.answered(output)
            outputs: StepOutputs = super().update_from_output(step, output)
            return outputs

        def set_pause_state(self, state: PauseState) -> None:
            observer.pause_state_set(state)
            super().set_pause_state(state)

        def set_limits(self, max_running: int, budget: int) -> None:
            observer.limits_set(max_running, budget)
            super().set_limits(max_running, budget)

        def reset_prefix_cache(self, reset_running: bool = False) -> bool:
            if not self._restarting:
                observer.prefix_cache_reset(reset_running)
            done: bool = super().reset_prefix_cache(reset_running)
            return done

        _restarting = False

        def restart(self) -> None:
            observer.restarted()
            self._restarting = True
            super().restart()
            self._restarting = False

        def allow_only(self, request_ids: Iterable[str] | None) -> None:
            ids = None if request_ids is None else sorted(request_ids)
            observer.allowed_only(ids)
            super().allow_only(ids)

    Observed.__name__ = Observed.__qualname__ = scheduler_cls.__name__
    return Observed
