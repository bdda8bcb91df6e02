"""The start of a group of ranks: phases with deadlines, and the agreement on the size of the KV cache."""

from __future__ import annotations

import logging
import select
from dataclasses import dataclass

from executor.base import EngineCapacity, check_capacity
from executor.config import ExecutorConfig
from executor.control import CacheSize, Capacity, EnteredPhase, Failure, Ready, send
from executor.errors import WorkerStartFailed
from executor.rank_process import RankProcess, first_cause
from executor.stderr_capture import StderrCapture
from transport.clock import Clock
from transport.errors import TransportError
from transport.message_queue import MessageQueue
from transport.waiting import WaitPolicy

logger = logging.getLogger("executor")

_LONGEST_TICK_S = 0.5
_ATTACH_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Starting:
    process: RankProcess
    since_s: float
    phase: str = "spawn"
    capacity: Capacity | None = None
    waits: bool = False  # for the others' capacities
    ready: Ready | None = None
    warned: str = ""  # the phase for which a warning was logged


class GroupStart:
    """Takes ranks, which have their `StartOrder`s, to ready."""

    def __init__(
        self,
        config: ExecutorConfig,
        ranks: list[RankProcess],
        stderr: StderrCapture,
        num_blocks: int | None,
        clock: Clock,
    ) -> None:
        """`num_blocks`: KV blocks to have, neither more nor fewer; None: as many as all have room for."""
        self._config = config
        self._num_blocks = num_blocks
        self._processes = ranks
        self._stderr = stderr
        self._clock = clock
        now = clock.monotonic()
        self._ranks = [_Starting(process, now) for process in ranks]

    def run(self, stop_event: int) -> EngineCapacity | None:
        """Returns when all ranks are ready; None if `stop_event` became readable first. Raises
        `WorkerStartFailed`."""
        poller = select.poll()
        poller.register(stop_event, select.POLLIN)
        for process in self._processes:
            poller.register(process.control, select.POLLIN)
            poller.register(process.pidfd, select.POLLIN)
        shortest = min(self._config.start_timeout_s, self._config.warn_after_s)
        tick_ms = min(_LONGEST_TICK_S, max(shortest / 8, 0.02)) * 1000
        capacity = None
        while True:
            ready = poller.poll(tick_ms)
            if any(fd == stop_event for fd, _ in ready):
                return None
            self._raise_first_cause()
            if capacity is None and all(rank.capacity for rank in self._ranks):
                capacity = self._agree()
            if capacity is not None and all(rank.ready for rank in self._ranks):
                return capacity
            self._check_deadlines()

    def attach_answers(self) -> list[MessageQueue]:
        """The reading ends of the ranks' answers."""
        queues: list[MessageQueue] = []
        wait = WaitPolicy(processes=len(self._ranks) + 1)
        for rank, starting in enumerate(self._ranks):
            assert starting.ready is not None
            try:
                queues.append(
                    MessageQueue.attach(
                        starting.ready.answers, 0, timeout_s=_ATTACH_TIMEOUT_S, wait=wait, clock=self._clock
                    )
                )
            except TransportError as error:
                for queue in queues:
                    queue.close()
                self._raise_first_cause()
                raise self._failed(rank, str(error)) from error
        return queues

    def _raise_first_cause(self) -> None:
        cause = first_cause(self._processes, self._take_packets)
        if cause is not None:
            process, report = cause
            raise self._failed(process.rank, report.message if report else "", process.exit_code())

    def _take_packets(self) -> dict[int, Failure]:
        failures = {}
        for rank, starting in enumerate(self._ranks):
            for packet in starting.process.packets():
                if isinstance(packet, Failure):
                    failures[rank] = packet
                elif isinstance(packet, EnteredPhase):
                    starting.phase = packet.phase
                elif isinstance(packet, Capacity):
                    starting.capacity = packet
                    starting.waits = True
                else:
                    starting.ready = packet
                starting.since_s = self._clock.monotonic()
        return failures

    def _agree(self) -> EngineCapacity:
        """All capacities are known: settle on the least, and tell the ranks."""
        capacities = [rank.capacity for rank in self._ranks if rank.capacity is not None]
        first = capacities[0]
        for rank, capacity in enumerate(capacities):
            if (capacity.model, capacity.max_model_len) != (first.model, first.max_model_len):
                message = f"its model differs from rank 0's: {capacity.model} and {first.model}"
                raise self._failed(rank, message)
        num_blocks = [capacity.num_blocks for capacity in capacities]
        least = min(num_blocks)
        try:
            check_capacity(least, self._num_blocks)
        except ValueError as error:
            raise self._failed(num_blocks.index(least), str(error)) from error
        agreed = least if self._num_blocks is None else self._num_blocks
        for starting in self._ranks:
            starting.waits = False
            starting.since_s = self._clock.monotonic()
            send(starting.process.control, CacheSize(agreed))
        model = first.model
        return EngineCapacity(agreed, model.vocab_size, first.max_model_len, model.dtype, model.eos_token_id)

    def _check_deadlines(self) -> None:
        now = self._clock.monotonic()
        for rank, starting in enumerate(self._ranks):
            age = now - starting.since_s
            if starting.waits or starting.ready is not None:
                continue
            if age >= self._config.start_timeout_s:
                stack = starting.process.dump_stack() if starting.phase != "spawn" else ""
                raise self._failed(rank, f"not done after {age:.3g} s", stack=stack)
            if age >= self._config.warn_after_s and starting.warned != starting.phase:
                starting.warned = starting.phase
                logger.warning(
                    "waiting for rank %d (pid %d): %.1f s in start phase '%s', limit %.1f s",
                    rank,
                    starting.process.pid,
                    age,
                    starting.phase,
                    self._config.start_timeout_s,
                )

    def _failed(
        self, rank: int, message: str, exit_code: int | None = None, stack: str = ""
    ) -> WorkerStartFailed:
        starting = self._ranks[rank]
        if message:
            exit_code = None  # it ended because of what it reports
        tail = self._stderr.tail(rank)
        return WorkerStartFailed(rank, starting.process.pid, starting.phase, message, exit_code, stack, tail)
