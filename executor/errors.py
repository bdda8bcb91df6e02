"""What goes wrong with a rank, told so that an operator can act on it.

`str(error)` is one sentence that begins with the cause. `error.report()` adds what the rank last wrote to its
standard error and, for a stuck one, where each of its threads stands.
"""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass

_LONGEST_TEXT = 2000
_LONGEST_TRACEBACK = 16 << 10


class ExecutorError(Exception):
    """Base of everything an executor raises about its ranks."""

    def report(self) -> str:
        """The error with its evidence, over several lines."""
        return str(self)


@dataclass(eq=False)
class _RankError(ExecutorError):
    rank: int
    pid: int | None = None

    def __post_init__(self) -> None:
        # So that the fields survive pickling and copying, as with any exception.
        super().__init__(*(getattr(self, name) for name in self.__dataclass_fields__))

    def who(self) -> str:
        return f"worker rank {self.rank}" + (f" (pid {self.pid})" if self.pid is not None else "")


@dataclass(eq=False)
class WorkerFailed(_RankError):
    """A rank raised, died, or answered with something that is not an answer.

    `exit_code` is a process's exit status as `subprocess` gives it: negative for a signal; None if it lives.
    """

    method: str | None = None
    step_id: int | None = None
    exit_code: int | None = None
    message: str = ""
    stderr_tail: str = ""

    @property
    def signal_name(self) -> str | None:
        return signal_name(self.exit_code)

    def __str__(self) -> str:
        where = _doing(self.method, self.step_id)
        if self.exit_code is not None:
            text = f"{self.who()} {ended(self.exit_code)}{where}"
            return f"{text}: {self.message}" if self.message else text
        return f"{self.who()} failed{where}: {self.message}"

    def report(self) -> str:
        return _with_evidence(str(self), self.stderr_tail)


@dataclass(eq=False)
class WorkerTimeout(_RankError, TimeoutError):
    """A rank did not answer in time. `ranks` are all that did not; `rank` is the first of them."""

    method: str | None = None
    step_id: int | None = None
    num_rows: int | None = None
    waited_s: float = 0.0
    ranks: tuple[int, ...] = ()
    state: str = ""  # what the kernel says the process is doing, e.g. "T (stopped)"
    stack: str = ""
    stderr_tail: str = ""

    def __str__(self) -> str:
        rows = f" of {self.num_rows} requests" if self.num_rows is not None else ""
        also = [rank for rank in self.ranks if rank != self.rank]
        others = f"; nor did rank {', '.join(map(str, also))}" if also else ""
        state = f"; its process is in state {self.state}" if self.state else ""
        return (
            f"{self.who()} did not answer within {self.waited_s:.3g} s"
            f"{_doing(self.method, self.step_id)}{rows}{others}{state}"
        )

    def report(self) -> str:
        text = _with_evidence(str(self), self.stderr_tail)
        return f"{text}\nstack of rank {self.rank}:\n{self.stack.rstrip()}" if self.stack else text


@dataclass(eq=False)
class WorkerStartFailed(_RankError):
    """A rank did not become ready. `phase` is the one it was in: spawn, import, init, load, kv or ready."""

    phase: str = "init"
    message: str = ""
    exit_code: int | None = None
    stack: str = ""
    stderr_tail: str = ""

    @property
    def signal_name(self) -> str | None:
        return signal_name(self.exit_code)

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"{self.who()} {ended(self.exit_code)} in start phase '{self.phase}'"
        return f"{self.who()} failed in start phase '{self.phase}': {self.message}"

    def report(self) -> str:
        text = _with_evidence(str(self), self.stderr_tail)
        return f"{text}\nstack of rank {self.rank}:\n{self.stack.rstrip()}" if self.stack else text


class ExecutorClosed(ExecutorError):
    """The executor was not initialized, or was shut down."""

    def __str__(self) -> str:
        return "the executor is not running"


class ExecutorRestarting(ExecutorError):
    """The call was not made: the ranks are being restarted."""

    def __str__(self) -> str:
        return "the workers are being restarted; try again in a moment"


def described(error: BaseException) -> str:
    """`ValueError: what it says`, of bounded length."""
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception as unspeakable:  # the user's class
        text = f"(its text cannot be had: {type(unspeakable).__name__})"
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]} ... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def traceback_of(error: BaseException) -> str:
    """Its end, if it is long."""
    text = "".join(traceback.format_exception(error)).encode(errors="backslashreplace").decode()
    return text[-_LONGEST_TRACEBACK:]


def signal_name(exit_code: int | None) -> str | None:
    """`SIGKILL` for -9; None where no signal ended the process."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"


def ended(exit_code: int) -> str:
    """How a process ended, as a verb phrase."""
    name = signal_name(exit_code)
    return f"was killed by {name}" if name else f"exited with code {exit_code}"


def _doing(method: str | None, step_id: int | None) -> str:
    if method is None:
        return " while idle"
    return f" in {method}" + (f" of step {step_id}" if step_id is not None else "")


def _with_evidence(text: str, stderr_tail: str) -> str:
    return f"{text}\nlast lines of its stderr:\n{stderr_tail.rstrip()}" if stderr_tail.strip() else text
