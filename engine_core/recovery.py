"""What to do when the ranks fail: restart them, find the request that makes them fail, or give up.

A pure state machine: `EngineCore` tells it of failures and of progress, and does what it says.

Restarts are limited: at most `max_restarts` within `window_s`, then `RestartsExhausted`.

A failure that the worker brought about itself (it raised, answered rubbish, exited, or did not answer in
time) makes suspects of the requests of its step. They are *tried*: nobody else runs, and the suspects run in
halves. A group that fails is halved again; a group of which everybody got one token further than at its
failure is cleared. A request that fails alone twice in a row is *convicted*: it ends with an error, everybody
else goes on. So one bad request among n costs log2(n) + 3 restarts, and a failure that does not repeat costs
one, and no request.

A death by a signal may have come from outside (the system ran out of memory, somebody typed kill). Its step
is retried once as it is; only requests that were in two such deaths without getting on in between are tried,
and in a trial two deaths are one failure.

Restarts during a trial are not counted, as long as they are no more than the search for one culprit can need.
A conviction explains the failure that led to it: that restart is not counted either, if the workers have made
tokens since the conviction before. Workers that fail whatever they are given therefore use up the limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.errors import ExecutorError, WorkerFailed, WorkerTimeout
from transport.clock import SYSTEM_CLOCK, Clock

_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 10.0
_HISTORY = 16  # failures told at the end

# What a failure weighs against the requests of its step, and when that is enough.
_OWN_DOING = 2
_FROM_OUTSIDE = 1
_TO_SPLIT = 2
_TO_CONVICT = 4

Known = Mapping[str, int]  # request id: tokens it knows


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the ranks anew, not before `after_s`; `convicted` is the request to end with the cause."""

    after_s: float = 0.0
    convicted: str | None = None


class RestartsExhausted(ExecutorError):
    """The ranks have failed too often. `cause` is the last failure, `history` all of the window: seconds
    before the last one, and text.
    """

    def __init__(
        self, cause: ExecutorError, max_restarts: int, window_s: float, history: list[tuple[float, str]]
    ) -> None:
        super().__init__(cause, max_restarts, window_s, history)
        self.cause = cause
        self.max_restarts = max_restarts
        self.window_s = window_s
        self.history = history

    def __str__(self) -> str:
        return f"{self.cause} ({self._limit()})"

    def report(self) -> str:
        lines = [self.cause.report(), self._limit()]
        if self.history:
            lines.append("failures before:")
            lines += [f"  {age_s:.1f} s earlier: {text}" for age_s, text in self.history]
        return "\n".join(lines)

    def _limit(self) -> str:
        return f"the ranks are not restarted more than {self.max_restarts} times within {self.window_s:g} s"


class RestartImpossible(ExecutorError):
    """The ranks failed with `cause`, and new ones would not be what those before were, since `method` was
    called.
    """

    def __init__(self, cause: ExecutorError, method: str) -> None:
        super().__init__(cause, method)
        self.cause = cause
        self.method = method

    def __str__(self) -> str:
        return f"{self.cause} ({self._why()})"

    def report(self) -> str:
        return f"{self.cause.report()}\n{self._why()}"

    def _why(self) -> str:
        return (
            f"the ranks are not restarted, because {self.method} has changed them since they started "
            "and nobody has kept what it gave them"
        )


@dataclass(slots=True)
class _Group:
    """Requests that are tried together. `pending` are those that have not got on since they failed."""

    members: frozenset[str]
    pending: dict[str, int]
    weight: int = 0  # of its failures

    @classmethod
    def of(cls, known: Known, weight: int = 0) -> _Group:
        return cls(frozenset(known), dict(known), weight)


@dataclass(slots=True)
class _Trial:
    groups: list[_Group]  # the first is on trial now
    counted: float | None  # when the restart that led to it was counted; None: it no longer is
    paid: bool = False  # the counted restart stands for a conviction
    free: int = field(init=False)  # restarts to come that are not counted

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """As many as finding one more culprit by deaths from outside can need."""
        suspects = sum(len(group.members) for group in self.groups)
        halvings = math.ceil(math.log2(max(suspects, 1)))
        self.free = (halvings * _TO_SPLIT + _TO_CONVICT) // _FROM_OUTSIDE


class Recovery:
    """One engine's. Request ids are those of live requests."""

    def __init__(self, max_restarts: int, window_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._clock = clock
        self._counted: list[float] = []  # when restarts were counted, ascending
        self._failures: deque[tuple[float, str]] = deque(maxlen=_HISTORY)
        self._failed_starts = 0  # in a row
        self._watched: dict[str, int] = {}  # were in a death from outside, and have not got on since
        self._trial: _Trial | None = None
        self._tokens_at_conviction = 0

    def failed(self, cause: ExecutorError, suspects: Known, tokens_made: int) -> Restart:
        """The ranks failed. Raises `RestartsExhausted`.

        `suspects` are the live requests of the step that failed, in its order; none if no step was to blame.
        `tokens_made` counts all tokens that steps have yielded so far.
        """
        convicted = None
        if self._trial is None:
            accused = self._accused(cause, suspects)
            at = self._count(cause)
            if accused:
                self._trial = _Trial(_halves(accused), at)
                self._watched.clear()
        else:
            is_free = bool(suspects) and self._trial.free > 0
            if suspects:
                self._trial.free -= 1
                convicted = self._judge(self._trial, cause, suspects)
            if convicted is not None:
                is_free = self._settle(self._trial, tokens_made)
            if not is_free:
                self._count(cause)
            if not self._trial.groups:
                self._trial = None
        self._failures.append((self._clock.monotonic(), str(cause)))
        return Restart(0.0, convicted)

    def start_failed(self, cause: ExecutorError) -> Restart:
        """The ranks did not come up again. Raises `RestartsExhausted`."""
        self._count(cause)
        self._failures.append((self._clock.monotonic(), str(cause)))
        delay_s = min(_FIRST_DELAY_S * 2**self._failed_starts, _LONGEST_DELAY_S)
        self._failed_starts += 1
        return Restart(delay_s)

    def restarted(self) -> None:
        """The ranks are up again."""
        self._failed_starts = 0

    @property
    def is_watching(self) -> bool:
        """Whether `observe` wants to be called after each step."""
        return self._trial is not None or bool(self._watched)

    @property
    def observed(self) -> frozenset[str]:
        """The requests that `observe` wants to hear of."""
        head = self._trial.groups[0].members if self._trial is not None else frozenset()
        return head.union(self._watched)

    @property
    def allowed(self) -> frozenset[str] | None:
        """Who may run now; None: everybody."""
        return self._trial.groups[0].members if self._trial is not None else None

    def observe(self, known: Known) -> bool:
        """A step is done. `known` are the `observed` requests that still live. True if `allowed` changed."""
        self._watched = _still_pending(self._watched, known)
        trial = self._trial
        if trial is None:
            return False
        group = trial.groups[0]
        group.pending = _still_pending(group.pending, known)
        if group.pending:
            return False
        del trial.groups[0]
        if not trial.groups:
            self._trial = None
        return True

    # Helpers

    def _accused(self, cause: ExecutorError, suspects: Known) -> dict[str, int]:
        """Who must be tried for a failure outside a trial."""
        if is_own_doing(cause):
            return dict(suspects)
        again = {request_id: n for request_id, n in suspects.items() if request_id in self._watched}
        if not again:
            self._watched.update(suspects)
        return again

    @staticmethod
    def _judge(trial: _Trial, cause: ExecutorError, suspects: Known) -> str | None:
        """The group on trial failed. Returns the culprit if it is known now."""
        group = trial.groups[0]
        if group.members != suspects.keys():
            # The step was with some of them only, or was in flight when another group's turn came.
            rest = {request_id: n for request_id, n in group.pending.items() if request_id not in suspects}
            group = _Group.of(suspects)
            trial.groups[:1] = [group, _Group.of(rest)] if rest else [group]
        group.weight += _OWN_DOING if is_own_doing(cause) else _FROM_OUTSIDE
        if len(suspects) > 1:
            if group.weight >= _TO_SPLIT:
                trial.groups[:1] = _halves(suspects)
            return None
        if group.weight < _TO_CONVICT:
            return None
        del trial.groups[0]
        return next(iter(suspects))

    def _settle(self, trial: _Trial, tokens_made: int) -> bool:
        """A culprit was found. Whether the restart to come is free."""
        works = tokens_made > self._tokens_at_conviction
        self._tokens_at_conviction = tokens_made
        trial.renew()
        if works:
            if trial.counted is not None and not trial.paid and trial.counted in self._counted:
                self._counted.remove(trial.counted)
            trial.counted = None
            return True
        was_paid, trial.paid = trial.paid or trial.counted is None, True
        return not was_paid

    def _count(self, cause: ExecutorError) -> float:
        """Count a restart; returns when. Raises if there may be none."""
        now = self._clock.monotonic()
        self._counted = [at for at in self._counted if at > now - self.window_s]
        if len(self._counted) >= self.max_restarts:
            history = [(now - at, text) for at, text in self._failures if at > now - self.window_s]
            raise RestartsExhausted(cause, self.max_restarts, self.window_s, history)
        self._counted.append(now)
        return now


def is_own_doing(cause: ExecutorError) -> bool:
    """Whether a rank failed by what it did, rather than by what was done to its process."""
    if isinstance(cause, WorkerFailed):
        return cause.signal_name is None
    if isinstance(cause, WorkerTimeout):
        return not cause.state.lower().startswith("t")  # somebody has stopped the process
    return False


def _still_pending(pending: dict[str, int], known: Known) -> dict[str, int]:
    """Without those that got on or ended."""
    return {request_id: n for request_id, n in pending.items() if known.get(request_id, n + 1) <= n}


def _halves(known: Known) -> list[_Group]:
    """The groups to try after a failure of all of these."""
    if len(known) == 1:
        return [_Group.of(known, _TO_SPLIT)]
    items = list(known.items())
    middle = (len(items) + 1) // 2
    return [_Group.of(dict(part)) for part in (items[:middle], items[middle:])]
