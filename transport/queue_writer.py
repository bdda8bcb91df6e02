"""The writer's end of a `MessageQueue`."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

from transport.clock import Clock
from transport.errors import Cancelled, QueueClosed, QueueFull, ReaderDied, TransportError, TransportTimeout
from transport.handover import Arrival, Reception, Roster
from transport.message_queue import Handle, MessageQueue, QueueStats
from transport.processes import own_identity
from transport.ring import FIRST, LAST, MORE, RingWriter, ShmRingBuffer, nbytes_of
from transport.waiting import Sleeper, SpinCondition, WaitPolicy

if TYPE_CHECKING:
    from transport.ring import Buffer

logger = logging.getLogger("transport")


class QueueWriter(MessageQueue):
    """See `MessageQueue.create`."""

    def __init__(
        self, *, n_local: int, name: str, capacity_bytes: int, wait: WaitPolicy, clock: Clock
    ) -> None:
        self.name = name
        self._clock = clock
        self._warn_after_s = wait.warn_after_s
        self._identity = own_identity()
        self._token = secrets.token_bytes(16)
        self._roster = Roster(n_local)
        self._readers: dict[int, Arrival] = {}  # by place in the ring
        self._by_fd: dict[int, Arrival] = {}
        self._error: TransportError | None = None  # why nothing can be sent any more
        self._messages = 0
        self._payload_bytes = 0

        self._ring = ShmRingBuffer.create(n_local, capacity_bytes)
        self._doorbells = [_eventfd() for _ in range(n_local)]
        self._room = _eventfd()
        self._writer = RingWriter(self._ring, self._doorbells)
        self._reception = Reception(self._ring, self._doorbells, self._room, self._token, self._roster)
        self._sleeper = Sleeper(self._room, self._on_event, queue=name)
        self._sleeper.watch(self._reception.news)
        self._condition = SpinCondition(
            self._ring.words,
            self._sleeper,
            wait,
            park=self._writer.park,
            unpark=self._writer.unpark,
            crowded=n_local + 1 > (os.cpu_count() or 1),
            clock=clock,
        )

    def handle(self) -> Handle:
        return Handle(
            name=self.name,
            n_readers=self._roster.n_readers,
            writer=self._identity,
            token=self._token,
            address=self._reception.address,
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while missing := self._missing_ranks():
            self._raise_if_unusable()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                ranks = ", ".join(map(str, missing))
                raise TransportTimeout(
                    f"rank{'s' if len(missing) > 1 else ''} {ranks} did not attach to queue {self.name!r} "
                    f"within {timeout_s:g} s",
                    queue=self.name,
                    waited_s=timeout_s,
                    missing_ranks=missing,
                )
            self._sleeper.sleep(left)
        self.check_peers()

    def check_peers(self) -> None:
        self._raise_if_unusable()
        self._sleeper.sleep(0.0)

    def enqueue(self, *parts: Buffer, timeout_s: float) -> None:
        if self._error is not None or self._sleeper.cancelled:
            self._raise_if_unusable()
        if not self._messages & 63:
            self._sleeper.sleep(0.0)  # a dead reader is noticed even while there is room
        nbytes = 0
        for part in parts:
            nbytes += len(part) if part.__class__ is bytes else nbytes_of(part)
        if nbytes > self._writer.max_payload:
            self._write_in_pieces(parts, nbytes, timeout_s)
        elif not self._writer.try_write(parts, nbytes):
            self._write_when_possible(parts, nbytes, self._clock.monotonic() + timeout_s, timeout_s)
        self._messages += 1
        self._payload_bytes += nbytes

    def cancel(self) -> None:
        self._sleeper.cancel()

    def close(self) -> None:
        if isinstance(self._error, QueueClosed):
            return
        self._error = QueueClosed(self.name, "this end")
        if os.getpid() == self._identity.pid:  # a forked child gives back its descriptors, no more
            self._writer.finish()
            self._reception.close()
        for reader in self._readers.values():
            reader.close()
        self._sleeper.close()
        for fd in (*self._doorbells, self._room):
            os.close(fd)
        self._ring.close()

    @property
    def stats(self) -> QueueStats:
        return QueueStats(
            messages=self._messages,
            payload_bytes=self._payload_bytes,
            waits=self._condition.waits,
            parks=self._condition.parks,
            wakes=self._writer.wakes,
            waited_s=self._condition.waited_s,
            longest_wait_s=self._condition.longest_wait_s,
        )

    def _write_in_pieces(self, parts: tuple[Buffer, ...], nbytes: int, timeout_s: float) -> None:
        """A message larger than the ring goes through it in pieces, of which readers put it together again.

        If the deadline passes in between, the readers drop what they have when the next message begins.
        """
        deadline = self._clock.monotonic() + timeout_s
        kind = FIRST
        piece: list[Buffer] = [nbytes.to_bytes(8, "little")]
        room = self._writer.piece_bytes - 8
        left = nbytes
        for part in parts:
            view = memoryview(part).cast("B")  # type: ignore[arg-type]
            while view.nbytes:
                head, view = view[:room], view[room:]
                piece.append(head)
                room -= head.nbytes
                left -= head.nbytes
                if room == 0 or left == 0:
                    size = sum(map(nbytes_of, piece))
                    self._write_when_possible(piece, size, deadline, timeout_s, LAST if left == 0 else kind)
                    kind, piece, room = MORE, [], self._writer.piece_bytes

    def _write_when_possible(
        self,
        parts: tuple[Buffer, ...] | list[Buffer],
        nbytes: int,
        deadline: float,
        timeout_s: float,
        kind: int = 0,
    ) -> None:
        writer, start, warn_after = self._writer, self._clock.monotonic(), self._warn_after_s
        while True:
            reader, head = writer.slowest()
            old = writer.word(head)  # read before trying, so that room made after the try changes it
            if writer.try_write(parts, nbytes, kind):
                return
            if self._condition.wait(head, old, min(deadline, start + warn_after)):
                continue
            now = self._clock.monotonic()
            if now >= deadline:
                rank, pid = self._who(reader)
                raise QueueFull(self.name, rank, pid, *writer.lag(reader), timeout_s)
            if now - start >= warn_after:
                self._warn(reader, now - start)
                warn_after *= 2

    def _warn(self, reader: int, waited_s: float) -> None:
        rank, pid = self._who(reader)
        messages, nbytes = self._writer.lag(reader)
        logger.warning(
            "queue %r has been full for %.1f s: reader rank %d (%s) is %d messages (%d bytes) behind",
            self.name,
            waited_s,
            rank,
            "never attached" if pid is None else f"pid {pid}",
            messages,
            nbytes,
        )

    def _who(self, reader: int) -> tuple[int, int | None]:
        """(rank, pid) of the reader at a place in the ring; of a missing one if nobody sits there."""
        arrival = self._readers.get(reader)
        return (arrival.rank, arrival.pid) if arrival is not None else (self._missing_ranks()[0], None)

    def _missing_ranks(self) -> tuple[int, ...]:
        here = {reader.rank for reader in self._readers.values()}
        return tuple(rank for rank in range(self._roster.n_readers) if rank not in here)

    def _on_event(self, fd: int) -> None:
        if fd == self._reception.news:
            os.eventfd_read(fd)
            while self._reception.arrivals:
                arrival = self._reception.arrivals.popleft()
                self._readers[arrival.index] = arrival
                for watched in (arrival.connection.fileno(), arrival.pidfd):
                    self._by_fd[watched] = arrival
                    self._sleeper.watch(watched)
            return
        reader = self._by_fd[fd]
        self._error = ReaderDied(
            self.name, reader.rank, reader.pid, closed=self._writer.has_left(reader.index)
        )
        raise self._error

    def _raise_if_unusable(self) -> None:
        if self._sleeper.cancelled and not isinstance(self._error, QueueClosed):
            raise Cancelled(self.name)
        if self._error is not None:
            raise self._error


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
