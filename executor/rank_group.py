"""All ranks of one engine as one thing that is started, fails, and is stopped as a whole.

A thread of the group starts the processes, watches them, and ends them. Watching means: each process's pidfd
and control socket, and how long each rank has been busy with what was broadcast. The first failure is the
group's failure for good: every waiter gets it at once, the callback hears it once, and what follows from it
is not looked at. To go on after a failure, stop the group and make another.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from concurrent.futures import Future as StartFuture
from concurrent.futures import wait as await_futures
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple

from executor.base import EngineCapacity, FailureCallback
from executor.config import ExecutorConfig
from executor.control import Failure, StartOrder, send
from executor.errors import ExecutorClosed, ExecutorError, WorkerFailed, WorkerTimeout, described
from executor.rank_process import RankProcess, first_cause
from executor.rank_start import GroupStart
from executor.stderr_capture import StderrCapture
from transport.clock import SYSTEM_CLOCK, Clock
from transport.collective import CollectiveSegment
from transport.errors import Cancelled, PeerDied, QueueClosed, QueueFull
from transport.message_queue import MessageQueue, QueueStats
from transport.state_page import StatePage

if TYPE_CHECKING:
    from transport.ring import Buffer

logger = logging.getLogger("executor")

_LONGEST_TICK_S = 0.5
_DONE_TICK_S = 0.0005
_CAUSE_WAIT_S = 1.0
_KILL_WAIT_S = 5.0


class Sent(NamedTuple):
    """A message that some rank may not have done yet."""

    seq: int
    method: str
    step_id: int | None
    num_rows: int | None
    at_s: float
    limit_s: float  # for each rank, from when it is free to begin


class RankGroup:
    """`start` once, then `send` and `receive` from one thread; `stop` from any.

    `on_failure` is called from the group's thread, or from the one that finds a rank breaking the rules.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        on_failure: FailureCallback,
        num_blocks: int | None = None,
        page: StatePage | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`num_blocks`: KV blocks to have, neither more nor fewer; None: as many as all have room for.

        `page`: where the ranks say what they do; None: a page of the group's own.
        """
        self.world_size = config.tensor_parallel_size
        self.ranks: list[RankProcess] = []
        self._config = config
        self._num_blocks = num_blocks
        self._on_failure = on_failure
        self._clock = clock
        with ExitStack() as made:
            self._page = made.enter_context(StatePage.create(self.world_size)) if page is None else page
            self._collective = None
            if self.world_size > 1:
                self._collective = made.enter_context(closing(CollectiveSegment(self.world_size)))
            self._broadcast = MessageQueue.create(n_local=self.world_size, name="steps", clock=clock)
            self._shared = made.pop_all()
        self._stderr = StderrCapture()
        self._answers: list[MessageQueue] = []
        self._sending = threading.Lock()  # held while waiting, as is the next; nothing else is
        self._receiving = threading.Lock()
        self._sent: deque[Sent] = deque()
        self.answered = [0] * self.world_size  # by rank, the last message whose answer was taken in
        self._sent_lock = threading.Lock()
        self._warned: set[tuple[int, int]] = set()  # rank, seq
        self._failure: ExecutorError | None = None
        self._failure_lock = threading.Lock()
        self._failed = threading.Event()
        self._stop_lock = threading.RLock()
        self._stop_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._graceful = True
        self._stopping = False
        self._closed = False
        self._started: StartFuture[EngineCapacity] = StartFuture()
        # The kernel kills the ranks when the thread that made them ends, so it has to be one that lasts.
        self._thread = threading.Thread(target=self._run, name="rank-group", daemon=True)

    # For the executor's thread

    def start(self) -> EngineCapacity:
        """Raises `WorkerStartFailed`, or `ExecutorClosed` if it is stopped; nothing is left then. Each phase
        has its deadline, so this wait needs none."""
        with self._stop_lock:
            if self._closed:
                raise ExecutorClosed
            self._thread.start()
        try:
            while not self._started.done():
                # A signal that comes just before a wait does not end it: look up now and then.
                await_futures((self._started,), _LONGEST_TICK_S)
            return self._started.result()
        except BaseException:
            self.stop(graceful=False)
            raise

    def send(
        self,
        seq: int,
        parts: list[Buffer],
        *,
        method: str,
        step_id: int | None,
        num_rows: int | None,
        limit_s: float,
    ) -> None:
        """Broadcast message number `seq`. Raises the group's failure."""
        with self._sending:
            with self._sent_lock:
                self._sent.append(Sent(seq, method, step_id, num_rows, self._clock.monotonic(), limit_s))
            try:
                self._broadcast.enqueue(*parts, timeout_s=limit_s)
            except (Cancelled, QueueClosed):
                raise self.failure() from None
            except QueueFull as error:
                late = WorkerTimeout(error.rank, error.pid, method, step_id, num_rows, limit_s, (error.rank,))
                raise self._fail(late) from error
            except PeerDied as error:
                raise self._await_failure(getattr(error, "rank", 0), str(error)) from error

    def receive(self, rank: int, timeout_s: float) -> bytes:
        """The next message from a rank. Raises TransportTimeout, or the group's failure."""
        with self._receiving:
            if self._failure is not None or self._stopping:
                raise self.failure()
            try:
                return self._answers[rank].dequeue_copy(timeout_s)
            except Cancelled:
                raise self.failure() from None
            except (QueueClosed, PeerDied) as error:
                raise self._await_failure(rank, str(error)) from error

    def await_done(self, seq: int) -> None:
        """Wait until all ranks have done message `seq`. Raises the group's failure, late ranks included."""
        while min(self._page.rank(rank).done for rank in range(self.world_size)) < seq:
            if self._stopping or self._failed.wait(_DONE_TICK_S):
                raise self.failure()

    def fail(self, rank: int, method: str, step_id: int | None, message: str) -> ExecutorError:
        """A rank broke the rules. Returns the group's failure, which may be an earlier one."""
        return self._fail(self._worker_failed(self.ranks[rank], method, step_id, message))

    def failure(self) -> ExecutorError:
        """What to raise where the group can no longer be used."""
        return self._failure or ExecutorClosed()

    def check_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def queue_stats(self) -> dict[str, QueueStats]:
        """This end's, by name: the steps and calls to the ranks, and the answers of each."""
        return {
            "steps": self._broadcast.stats,
            **{f"answers-{rank}": queue.stats for rank, queue in enumerate(self._answers)},
        }

    def whereabouts(self) -> dict[int, str]:
        now = self._clock.monotonic()
        places = {}
        for rank in range(self.world_size):
            row = self._page.rank(rank)
            what = f"in {row.method}" if row.phase == "running" else row.phase
            places[rank] = f"{what} for {now - row.since_s:.1f} s"
        return places

    def stop(self, *, graceful: bool) -> None:
        """End all ranks and give everything back. Idempotent; returns when done.

        Graceful: they are let go, get SIGTERM after half of `stop_grace_s` and SIGKILL after all of it; else
        SIGKILL at once. Not to be called by `on_failure`.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a group cannot be stopped by its own thread")
        with self._stop_lock:
            if self._closed:
                return
            self._graceful = graceful
            with self._failure_lock:
                self._stopping = True
                self._cancel_queues()
            os.eventfd_write(self._stop_event, 1)
            if self._thread.ident is not None:
                self._thread.join()  # bounded by `stop_grace_s` and `_KILL_WAIT_S`
            self._closed = True
            with self._sending, self._receiving:
                for queue in (self._broadcast, *self._answers):
                    queue.close()
            self._stderr.stop()
            self._shared.close()
            for process in self.ranks:
                process.close()
            os.close(self._stop_event)

    # The group's thread

    def _run(self) -> None:
        try:
            self._spawn()
            start = GroupStart(self._config, self.ranks, self._stderr, self._num_blocks, self._clock)
            capacity = start.run(self._stop_event)
            if capacity is None:
                raise ExecutorClosed
            self._answers = start.attach_answers()
            self._started.set_result(capacity)
            self._watch()
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                self._fail(ExecutorError(f"watching the ranks failed: {described(error)}"))
        select.select(
            [self._stop_event], [], []
        )  # no deadline: a failed group is kept until its owner stops it
        self._end_ranks()

    def _spawn(self) -> None:
        for rank in range(self.world_size):
            reader, writer = os.pipe()
            try:
                collective_fds = self._collective.fds if self._collective is not None else ()
                process = RankProcess(rank, self._page.fd, writer, collective_fds)
            except BaseException:
                os.close(reader)
                raise
            finally:
                os.close(writer)
            self.ranks.append(process)
            self._stderr.add(reader, f"(rank {rank} pid {process.pid}) ")
        self._stderr.start()
        handle = self._broadcast.handle()
        for process in self.ranks:
            order = StartOrder(
                self._config, process.rank, self.world_size, os.getpid(), list(sys.path), handle
            )
            send(process.control, order)

    def _watch(self) -> None:
        """Returns when the group failed or is to stop."""
        poller = select.poll()
        poller.register(self._stop_event, select.POLLIN)
        for process in self.ranks:
            poller.register(process.pidfd, select.POLLIN)
            poller.register(process.control, select.POLLIN)
        shortest = min(self._config.execute_timeout_s, self._config.warn_after_s)
        tick_ms = min(_LONGEST_TICK_S, max(shortest / 8, 0.02)) * 1000
        while not self._failed.is_set():
            ready = poller.poll(tick_ms)
            if any(fd == self._stop_event for fd, _ in ready):
                return
            failure = self._find_failure() if ready else self._find_late_rank()
            if failure is not None:
                self._fail(failure)

    def _find_failure(self) -> WorkerFailed | None:
        cause = first_cause(self.ranks, self._reports)
        if cause is None:
            return None
        process, report = cause
        if report is not None:
            return self._worker_failed(process, report.method, report.step_id, report.message)
        sent = self._busy_with(process.rank)
        method, step_id = (sent.method, sent.step_id) if sent is not None else (None, None)
        return self._worker_failed(process, method, step_id, exit_code=process.exit_code())

    def _reports(self) -> dict[int, Failure]:
        return {
            process.rank: packet
            for process in self.ranks
            for packet in process.packets()
            if isinstance(packet, Failure)
        }

    def _worker_failed(
        self,
        process: RankProcess,
        method: str | None,
        step_id: int | None,
        message: str = "",
        exit_code: int | None = None,
    ) -> WorkerFailed:
        tail = self._stderr.tail(process.rank)
        return WorkerFailed(process.rank, process.pid, method, step_id, exit_code, message, tail)

    def _busy_with(self, rank: int) -> Sent | None:
        """The first message that the rank has not done."""
        # A rank answers first and then notes that it has: when it dies in between, the answer counts.
        done = max(self._page.rank(rank).done, self.answered[rank])
        with self._sent_lock:
            return next((sent for sent in self._sent if sent.seq > done), None)

    def _find_late_rank(self) -> WorkerTimeout | None:
        now = self._clock.monotonic()
        done_by_all = min(self._page.rank(rank).done for rank in range(self.world_size))
        with self._sent_lock:
            while self._sent and self._sent[0].seq <= done_by_all:
                self._sent.popleft()
        late: list[tuple[bool, bool, bool, int, Sent, float]] = []
        for process in self.ranks:
            rank = process.rank
            sent = self._busy_with(rank)
            if sent is None:
                continue
            row = self._page.rank(rank)
            age = now - max(sent.at_s, row.since_s)  # since it could begin, or did
            if age >= sent.limit_s:
                # A rank that has not begun, that the kernel keeps from running, or that waits for no other
                # one holds up those that have.
                begun = row.taken >= sent.seq
                late.append((begun, not process.state(), row.waits_for != 0, rank, sent, age))
            elif age >= self._config.warn_after_s and (rank, sent.seq) not in self._warned:
                self._warned = {known for known in self._warned if known[1] > done_by_all}
                self._warned.add((rank, sent.seq))
                self._warn(process, sent, age)
        if not late:
            return None
        _, _, _, rank, sent, age = min(late)
        process = self.ranks[rank]
        return WorkerTimeout(
            rank,
            process.pid,
            sent.method,
            sent.step_id,
            sent.num_rows,
            age,
            tuple(other for _, _, _, other, of, _ in late if of.seq == sent.seq),
            process.state(),
            process.dump_stack(),
            self._stderr.tail(rank),
        )

    def _warn(self, process: RankProcess, sent: Sent, age: float) -> None:
        logger.warning(
            "waiting for rank %d (pid %d): %.1f s in %s%s%s, limit %.1f s",
            process.rank,
            process.pid,
            age,
            sent.method,
            "" if sent.step_id is None else f" of step {sent.step_id}",
            "" if sent.num_rows is None else f" with {sent.num_rows} requests",
            sent.limit_s,
        )

    def _end_ranks(self) -> None:
        if self._graceful and self._failure is None and self._answers:
            with self._sending:
                self._broadcast.close()  # each rank does what was sent before, and ends
            self._await_ends(self._config.stop_grace_s / 2)
            for process in self.ranks:
                process.terminate()
            self._await_ends(self._config.stop_grace_s / 2)
        for process in self.ranks:
            process.kill()
        for process in self._await_ends(_KILL_WAIT_S):
            logger.error(
                "rank %d (pid %d) did not end %.1f s after SIGKILL; its process is in state %s",
                process.rank,
                process.pid,
                _KILL_WAIT_S,
                process.state() or "unknown",
            )

    def _await_ends(self, timeout_s: float) -> list[RankProcess]:
        """Wait until all ranks have ended, and reap them. Returns those that have not by then."""
        deadline = self._clock.monotonic() + timeout_s
        while alive := [process for process in self.ranks if process.exit_code() is None]:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return alive
            poller = select.poll()
            for process in alive:
                poller.register(process.pidfd, select.POLLIN)
            poller.poll(left * 1000)
        return []

    # Failure, from either thread

    def _fail(self, error: ExecutorError) -> ExecutorError:
        """Returns the group's failure: `error`, or an earlier one."""
        with self._failure_lock:
            if self._failure is not None:
                return self._failure
            self._failure = error
            if not self._stopping:  # else that is done, and the queues may be closed by now
                self._cancel_queues()
        self._failed.set()
        self._on_failure(error)
        return error

    def _await_failure(self, rank: int, message: str) -> ExecutorError:
        """A queue says that a rank is gone; its process says why, at nearly the same time."""
        if self._stopping or self._failed.wait(_CAUSE_WAIT_S):
            return self.failure()
        return self._fail(self._worker_failed(self.ranks[rank], None, None, message))

    def _cancel_queues(self) -> None:
        for queue in (self._broadcast, *self._answers):
            queue.cancel()
