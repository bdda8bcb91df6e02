"""The two sides of the ring: the readers on this host as the writer sees them, and the end of such a
reader.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transport import handover
from transport.clock import Clock
from transport.errors import (
    AttachRefused,
    Cancelled,
    QueueClosed,
    ReaderDied,
    TransportError,
    TransportTimeout,
    WriterDied,
)
from transport.handover import Arrival, Reception, Roster
from transport.message_queue import NO_MESSAGE, Handle, Message, MessageQueue, QueueStats
from transport.ring import FIRST, LAST, MORE, ONE_LOOK, RingReader, RingWriter, ShmRingBuffer, nbytes_of
from transport.waiting import Sleeper, SpinCondition, WaitPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transport.ring import Buffer


class LocalReaders:
    """The writer's side: the ring, and who reads it."""

    def __init__(
        self, name: str, n_readers: int, capacity: int, token: bytes, roster: Roster, room: int
    ) -> None:
        """`room`: the eventfd on which the writer sleeps."""
        self._name = name
        self._readers: dict[int, Arrival] = {}  # by place in the ring
        self._by_fd: dict[int, Arrival] = {}
        self._ring = ShmRingBuffer.create(n_readers, capacity)
        self._doorbells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(n_readers)]
        self.writer = RingWriter(self._ring, self._doorbells)
        self._reception = Reception(self._ring, self._doorbells, room, token, roster)
        self.address = self._reception.address
        self.news = self._reception.news

    def condition(self, sleeper: Sleeper, policy: WaitPolicy, clock: Clock) -> SpinCondition:
        """The writer's way to wait for room."""
        return SpinCondition(
            self._ring.words,
            sleeper,
            policy,
            park=self.writer.park,
            unpark=self.writer.unpark,
            crowded=_crowded(self._ring, policy),
            clock=clock,
        )

    def ranks(self) -> set[int]:
        return {reader.rank for reader in self._readers.values()}

    def admit(self, sleeper: Sleeper) -> None:
        """`news` is readable: take over who has attached, and watch them."""
        os.eventfd_read(self.news)
        while self._reception.arrivals:
            arrival = self._reception.arrivals.popleft()
            self._readers[arrival.index] = arrival
            for fd in (arrival.connection.fileno(), arrival.pidfd):
                self._by_fd[fd] = arrival
                sleeper.watch(fd)

    def obituary(self, fd: int) -> ReaderDied:
        """The error for a reader's descriptor that hung up."""
        reader = self._by_fd[fd]
        return ReaderDied(self._name, reader.rank, reader.pid, closed=self.writer.has_left(reader.index))

    def who(self, index: int) -> tuple[int, int] | None:
        """(rank, pid) of the reader at a place in the ring; None if nobody has taken it."""
        reader = self._readers.get(index)
        return None if reader is None else (reader.rank, reader.pid)

    def finish(self) -> None:
        """Tell the readers that nothing will follow, and let nobody in any more."""
        self.writer.finish()
        self._reception.close()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        for fd in self._doorbells:
            os.close(fd)
        self._ring.close()


def pieces(parts: Sequence[Buffer], nbytes: int, piece_bytes: int) -> Iterator[tuple[int, list[Buffer], int]]:
    """A message larger than the ring as records (kind, parts, bytes), for readers to put together again."""
    kind = FIRST
    piece: list[Buffer] = [nbytes.to_bytes(8, "little")]
    room = piece_bytes - 8
    left = nbytes
    for part in parts:
        if not nbytes_of(part):
            continue  # with several dimensions it could not be cast
        view = memoryview(part).cast("B")  # type: ignore[arg-type]
        while view.nbytes:
            head, view = view[:room], view[room:]
            piece.append(head)
            room -= head.nbytes
            left -= head.nbytes
            if room == 0 or left == 0:
                yield (LAST if left == 0 else kind), piece, sum(map(nbytes_of, piece))
                kind, piece, room = MORE, [], piece_bytes


class LocalReader(MessageQueue):
    """See `MessageQueue.attach`."""

    def __init__(
        self, handle: Handle, rank: int, *, timeout_s: float, wait: WaitPolicy, clock: Clock
    ) -> None:
        self.name = handle.name
        self.rank = rank
        if not handle.address:
            raise AttachRefused(handle.name, rank, "it has no local readers")
        self._clock = clock
        self._writer = handle.writer
        self._pid = os.getpid()
        self._closed = False
        self._blocked = False  # closed or cancelled
        self._attachment = there = handover.attach(
            handle.address,
            handle.token,
            handle.writer,
            rank,
            queue=handle.name,
            timeout_s=timeout_s,
            clock=clock,
        )
        self._reader = RingReader(there.ring, there.index, there.writer_doorbell)
        self._try_read = self._reader.try_read
        self._message = Message(self._reader.release)
        self._sleeper = Sleeper(there.doorbell, self._on_event, queue=handle.name)
        self._sleeper.watch(there.connection.fileno())
        self._sleeper.watch(there.writer_pidfd)
        self._condition = SpinCondition(
            there.ring.words,
            self._sleeper,
            wait,
            park=self._reader.park,
            unpark=self._reader.unpark,
            crowded=_crowded(there.ring, wait),
            clock=clock,
        )
        self._polls = self._condition.polls
        self._waited_at = 0  # messages read by the last wait

    def check_peers(self) -> None:
        self._raise_if_unusable()
        self._sleeper.sleep(0.0)

    def dequeue(self, timeout_s: float) -> Message:
        message = self._message
        if self._blocked or message.view is not NO_MESSAGE:
            self._raise_if_unusable()
        view = self._try_read(self._polls if timeout_s > 0 else ONE_LOOK)
        if view is None:
            view = self._wait(timeout_s)
        message.view = view
        return message

    def dequeue_copy(self, timeout_s: float) -> bytes:
        if self._blocked or self._message.view is not NO_MESSAGE:
            self._raise_if_unusable()
        view = self._try_read(self._polls if timeout_s > 0 else ONE_LOOK)
        if view is None:
            view = self._wait(timeout_s)
        data = view.tobytes()
        self._reader.release()
        return data

    def cancel(self) -> None:
        self._blocked = True
        self._sleeper.cancel()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._blocked = True
        if os.getpid() == self._pid:
            self._reader.leave()
        self._message.abandon()
        self._sleeper.close()
        self._reader.close()
        self._attachment.close()

    @property
    def stats(self) -> QueueStats:
        return QueueStats(
            messages=self._reader.messages,
            payload_bytes=self._reader.payload_bytes,
            waits=self._condition.waits,
            parks=self._condition.parks,
            wakes=self._reader.wakes,
            waited_s=self._condition.waited_s,
            longest_wait_s=self._condition.longest_wait_s,
        )

    def _wait(self, timeout_s: float) -> memoryview:
        reader = self._reader
        deadline = self._clock.monotonic() + timeout_s
        quick = reader.messages - self._waited_at
        self._waited_at = reader.messages
        while self._clock.monotonic() < deadline:
            if self._condition.wait(*reader.position(), deadline, quick):
                view = reader.try_read()
                if view is not None:  # and not only a part of a message
                    return view
        if timeout_s <= 0:
            self._sleeper.sleep(0.0)  # who only looks hears of the writer's end, too
        raise TransportTimeout(
            f"rank {self.rank} got nothing from the writer (pid {self._writer.pid}) of queue {self.name!r} "
            f"within {timeout_s:g} s",
            queue=self.name,
            waited_s=timeout_s,
        )

    def _on_event(self, fd: int) -> None:
        """The writer closed the queue or died. What it published before that is read first."""
        closed = self._reader.is_closed()
        if self._reader.has_more():
            return
        if closed:
            raise QueueClosed(self.name, f"the writer (pid {self._writer.pid})")
        raise WriterDied(self.name, self._writer.pid)

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise QueueClosed(self.name, "this end")
        if self._sleeper.cancelled:
            raise Cancelled(self.name)
        if self._message.is_held:
            raise TransportError(f"the previous message of queue {self.name!r} has not been released")


def _crowded(ring: ShmRingBuffer, policy: WaitPolicy) -> bool:
    """Whether processes outnumber cores."""
    return max(ring.n_readers + 1, policy.processes) > (os.cpu_count() or 1)
