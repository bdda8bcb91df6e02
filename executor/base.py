"""What the engine asks of an executor, whichever way its ranks run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future as RestartFuture
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

import msgspec

from executor.config import ExecutorConfig
from executor.errors import ExecutorError
from executor.lasting_calls import LastingCalls
from executor.step import ModelRunnerOutput, SchedulerOutput
from transport.message_queue import QueueStats
from transport.state_page import StatePage

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
FailureCallback = Callable[[ExecutorError], None]


class EngineCapacity(msgspec.Struct, frozen=True):
    """What the ranks agreed on at their start."""

    num_gpu_blocks: int  # the null block included
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_id: int | None = None


def check_capacity(num_blocks: int, needed: int | None = None) -> None:
    """Raises `ValueError` if no request could ever run, or if there is less room than `needed` blocks."""
    if needed is not None and num_blocks < needed:
        raise ValueError(f"the KV cache has room for {num_blocks} blocks, it had {needed} before")
    if num_blocks < 2:
        raise ValueError(f"the KV cache has room for {num_blocks} blocks; at least 2 are needed")


class Future(Protocol[T_co]):
    """The answer to come of a call that was sent with `non_block=True`.

    Answers come in the order of the calls: asking for a later one first takes in the earlier ones. It belongs
    to the thread that uses the executor.
    """

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the answer, by default until the call's own deadline. Raises `ExecutorError`."""
        ...


class Completed(Generic[T]):
    """A future that is done."""

    def __init__(self, value: T | None = None, error: ExecutorError | None = None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # no error: there is a value


class Executor(ABC):
    """The ranks that run the model. All methods belong to one thread, except `shutdown`.

    Once a rank fails, every call raises the same first `ExecutorError`, until `restart`.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        self._lasting_calls = LastingCalls()

    @abstractmethod
    def initialize(self) -> EngineCapacity:
        """Start the ranks. Raises `WorkerStartFailed`; no rank is left running then."""

    @abstractmethod
    def restart(self, after_s: float = 0.0) -> RestartFuture[None]:
        """End the ranks at once and start others in their place, not before `after_s` seconds have passed.

        They have as many KV blocks as those before, all empty, know of no request, and sleep or have adapters
        as those before. The future raises `ExecutorError`, most likely `WorkerStartFailed` (also if there is
        no longer room for as many blocks); no rank is left running then, and `restart` may be called again.
        Until it is done, calls raise `ExecutorRestarting`.
        """

    @property
    def lost_call(self) -> str | None:
        """A method that was called and changed the ranks in a way that `restart` cannot bring back."""
        return self._lasting_calls.lost

    @abstractmethod
    def _submit_step(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]: ...

    @abstractmethod
    def _submit_call(
        self,
        method: str,
        timeout_s: float,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reply_rank: int | None,
    ) -> Future[Any]: ...

    @abstractmethod
    def await_all_ranks(self) -> None:
        """Wait until all ranks have done the step whose answer was taken in last. Raises `ExecutorError`."""

    @abstractmethod
    def check_failed(self) -> None:
        """Raise the first failure, if there was one. Costs nothing."""

    @abstractmethod
    def set_failure_callback(self, callback: FailureCallback) -> None:
        """`callback(error)` is called once, from any thread, when a rank fails; at once if one has."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the ranks: ask, then SIGTERM, then SIGKILL within `stop_grace_s`. Idempotent."""

    @overload
    def execute_model(
        self, step: SchedulerOutput, non_block: Literal[False] = False
    ) -> ModelRunnerOutput: ...
    @overload
    def execute_model(self, step: SchedulerOutput, non_block: Literal[True]) -> Future[ModelRunnerOutput]: ...
    def execute_model(
        self, step: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run one step on all ranks. Raises `WorkerFailed` or `WorkerTimeout` (after `execute_timeout_s`).

        With `non_block` errors come out of the future.
        """
        future = self._submit_step(step)
        return future if non_block else future.result()

    @overload
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        non_block: Literal[False] = False,
    ) -> Any: ...
    @overload
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        *,
        non_block: Literal[True],
    ) -> Future[Any]: ...
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker's method on every rank; returns the list of their answers by rank.

        With `unique_reply_rank` returns that rank's answer alone; all ranks run it, and a failure of any is
        raised. `timeout` in seconds, by default `execute_timeout_s`. Arguments and answers are plain data and
        numpy arrays (what msgpack can hold). Raises `WorkerFailed` (the ranks live on if a method raised),
        `WorkerTimeout` (a late answer is dropped).
        """
        if unique_reply_rank is not None and not 0 <= unique_reply_rank < self.config.tensor_parallel_size:
            raise ValueError(f"there is no rank {unique_reply_rank}")
        timeout_s = self.config.execute_timeout_s if timeout is None else timeout
        future = self._submit_call(method, timeout_s, args, kwargs or {}, unique_reply_rank)
        answer = future if non_block else future.result()
        self._lasting_calls.record(method, args, kwargs or {})
        return answer

    def queue_stats(self) -> dict[str, QueueStats]:
        """This end of the queues to and from the ranks, by name. From any thread."""
        return {}

    def whereabouts(self) -> dict[int, str]:
        """What each rank does, in words, for messages; empty if that cannot be told."""
        return {}

    def check_health(self) -> None:
        """Ask every rank whether it can work. Raises `ExecutorError`."""
        self.collective_rpc("check_health")


def make_executor(config: ExecutorConfig, page: StatePage | None = None) -> Executor:
    """The executor that `config` asks for: in process for one rank, unless told otherwise.

    `page`: where the ranks say what they do; it must outlive the executor.
    """
    backend = config.distributed_executor_backend
    if backend is None:
        backend = "uni" if config.tensor_parallel_size == 1 else "mp"
    if backend == "uni":
        from executor.uniproc import UniProcExecutor

        return UniProcExecutor(config, page)
    if backend == "mp":
        from executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, page)
    raise ValueError(f"distributed_executor_backend is '{backend}', not 'uni' or 'mp'")
