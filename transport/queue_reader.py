"""The end of a reader on the writer's host."""

from __future__ import annotations

import os

from transport import handover
from transport.clock import Clock
from transport.errors import (
    AttachRefused,
    Cancelled,
    QueueClosed,
    TransportError,
    TransportTimeout,
    WriterDied,
)
from transport.message_queue import Handle, Message, MessageQueue, QueueStats
from transport.ring import RingReader
from transport.waiting import Sleeper, SpinCondition, WaitPolicy


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
            crowded=there.ring.n_readers + 1 > (os.cpu_count() or 1),
            clock=clock,
        )

    def check_peers(self) -> None:
        self._raise_if_unusable()
        self._sleeper.sleep(0.0)

    def dequeue(self, timeout_s: float) -> Message:
        message = self._message
        if self._sleeper.cancelled or self._closed or message.is_held:
            self._raise_if_unusable()
        view = self._reader.try_read()
        if view is None:
            view = self._wait(timeout_s)
        message.view = view
        return message

    def cancel(self) -> None:
        self._sleeper.cancel()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
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
        while timeout_s > 0 and self._condition.wait(*reader.position(), deadline):
            view = reader.try_read()  # None: only a part of a message came
            if view is not None:
                return view
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
