"""Answers to come, taken in by the thread that waits for them, in the order of their calls.

Every message to the ranks has a number. A rank works through them in order and answers with the number, so an
answer is either the next one expected, or late: its caller has given up on it, and it is dropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from executor.call_codec import REPLY, Reply, decode_reply
from executor.errors import ExecutorError, WorkerFailed, WorkerTimeout
from executor.rank_group import RankGroup
from executor.step import ModelRunnerOutput
from executor.step_codec import OUTPUT, BadMessage, decode_output
from transport.clock import Clock
from transport.codec import decode
from transport.errors import CodecError, TransportTimeout

T = TypeVar("T")
Answer = ModelRunnerOutput | Reply


class FutureWrapper(ABC, Generic[T]):
    """A `Future` of one message: waits for the answers of `waiting`, the ranks that have not answered yet."""

    def __init__(
        self,
        answers: Answers,
        seq: int,
        method: str,
        step_id: int | None,
        waiting: list[int],
        limit_s: float = math.inf,
    ) -> None:
        self.seq = seq
        self.method = method
        self.step_id = step_id
        self.waiting = waiting
        self.limit_s = limit_s
        self.deadline = answers.clock.monotonic() + limit_s
        self.error: ExecutorError | None = None
        self._answers = answers

    def done(self) -> bool:
        return self.is_complete or self._answers.collect(self, 0.0)

    def result(self, timeout: float | None = None) -> T:
        if not self.is_complete:
            wait_s = math.inf if timeout is None else timeout
            if not self._answers.collect(self, wait_s):
                raise self._answers.timeout_of(self, wait_s)
        if self.error is not None:
            raise self.error
        return self.value()

    @property
    def is_complete(self) -> bool:
        return not self.waiting or self.error is not None

    @abstractmethod
    def accept(self, answer: Answer) -> None:
        """The answer of `waiting[0]`. Raises BadMessage."""

    @abstractmethod
    def value(self) -> T: ...


class StepFuture(FutureWrapper[ModelRunnerOutput]):
    """Of a step of `num_rows` rows, which the output rank answers. Its deadline is watched by the group."""

    def __init__(self, answers: Answers, seq: int, step_id: int, num_rows: int, output_rank: int) -> None:
        super().__init__(answers, seq, "execute_model", step_id, [output_rank])
        self._num_rows = num_rows
        self._output: ModelRunnerOutput

    def accept(self, answer: Answer) -> None:
        if not isinstance(answer, ModelRunnerOutput):
            raise BadMessage("a reply to a call, instead of a step's output")
        if answer.step_id != self.step_id or len(answer.num_sampled) != self._num_rows:
            raise BadMessage(
                f"an output of step {answer.step_id} with {len(answer.num_sampled)} rows, "
                f"instead of step {self.step_id} with {self._num_rows}"
            )
        self._output = answer

    def value(self) -> ModelRunnerOutput:
        return self._output


class CallFuture(FutureWrapper[Any]):
    """Of a call, which all ranks answer."""

    def __init__(
        self,
        answers: Answers,
        seq: int,
        method: str,
        world_size: int,
        reply_rank: int | None,
        limit_s: float,
    ) -> None:
        super().__init__(answers, seq, method, None, list(range(world_size)), limit_s)
        self._reply_rank = reply_rank
        self._replies: list[Reply] = []

    def accept(self, answer: Answer) -> None:
        if not isinstance(answer, Reply):
            raise BadMessage("a step's output, instead of a reply to a call")
        self._replies.append(answer)

    def value(self) -> Any:
        for rank, reply in enumerate(self._replies):
            if reply.error is not None:
                raise self._answers.call_failed(rank, self.method, reply)
        if self._reply_rank is not None:
            return self._replies[self._reply_rank].value
        return [reply.value for reply in self._replies]


class Answers:
    """The futures of one group that wait, in the order of their calls."""

    def __init__(self, group: RankGroup, clock: Clock) -> None:
        self.clock = clock
        self._group = group
        self._pending: deque[FutureWrapper[Any]] = deque()

    def expect(self, future: FutureWrapper[Any]) -> None:
        """`future`'s message was sent, after those of all before."""
        self._pending.append(future)

    def collect(self, until: FutureWrapper[Any], wait_s: float) -> bool:
        """Take in answers until `until` is complete, at most for `wait_s`. Whether it is."""
        deadline = self.clock.monotonic() + wait_s
        while not until.is_complete:
            head = self._pending[0]
            try:
                self._take_answers(head, min(deadline, head.deadline))
            except TransportTimeout:
                if self.clock.monotonic() < head.deadline:
                    return False
                head.error = self.timeout_of(head, head.limit_s)
            except ExecutorError as error:
                for future in self._pending:
                    future.error = error
                self._pending.clear()
                return True
            self._pending.popleft()
        return True

    def _take_answers(self, future: FutureWrapper[Any], deadline: float) -> None:
        while future.waiting:
            rank = future.waiting[0]
            data = self._group.receive(rank, max(deadline - self.clock.monotonic(), 0.0))
            try:
                seq, answer = _read(data)
                self._group.answered[rank] = seq
                if seq < future.seq:
                    continue  # late
                if seq > future.seq:
                    raise BadMessage(f"answer {seq} instead of {future.seq}")
                future.accept(answer)
            except (BadMessage, CodecError, msgspec.DecodeError, ValueError, IndexError) as error:
                message = f"sent an answer that is none: {error}"
                raise self._group.fail(rank, future.method, future.step_id, message) from error
            future.waiting.pop(0)

    def timeout_of(self, future: FutureWrapper[Any], waited_s: float) -> WorkerTimeout:
        rank = future.waiting[0]
        return WorkerTimeout(
            rank,
            self._group.ranks[rank].pid,
            future.method,
            future.step_id,
            waited_s=waited_s,
            ranks=tuple(future.waiting),
        )

    def call_failed(self, rank: int, method: str, reply: Reply) -> WorkerFailed:
        pid = self._group.ranks[rank].pid
        message = reply.error or ""
        return WorkerFailed(rank, pid, method, message=message, stderr_tail=reply.traceback)


def _read(data: bytes) -> tuple[int, Answer]:
    kind, head, arrays = decode(data)
    if kind == OUTPUT:
        return decode_output(head, arrays)
    if kind == REPLY:
        reply = decode_reply(head, arrays)
        return reply.seq, reply
    raise BadMessage(f"a message of kind {kind}")
