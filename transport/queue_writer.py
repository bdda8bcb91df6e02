"""The writer's end of a `MessageQueue`: it sends each message to the ring and to the remote readers."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING

from transport.clock import Clock
from transport.errors import Cancelled, QueueClosed, QueueFull, ReaderDied, TransportError, TransportTimeout
from transport.handover import Roster
from transport.local import LocalReaders, pieces
from transport.message_queue import CurveKeys, Handle, MessageQueue, QueueStats
from transport.processes import own_identity
from transport.ring import DATA, nbytes_of
from transport.waiting import Sleeper, WaitPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.remote import RemoteReaders
    from transport.ring import Buffer

logger = logging.getLogger("transport")


class QueueWriter(MessageQueue):
    """See `MessageQueue.create`."""

    def __init__(
        self,
        *,
        n_local: int,
        n_remote: int,
        name: str,
        capacity_bytes: int,
        remote_host: str | None,
        curve: CurveKeys | None,
        wait: WaitPolicy,
        clock: Clock,
    ) -> None:
        if n_local + n_remote < 1:
            raise ValueError("a queue has at least one reader")
        if n_remote and remote_host is None:
            raise ValueError("remote readers need remote_host, the address at which they connect")
        self.name = name
        self._clock = clock
        self._warn_after_s = wait.warn_after_s
        self._capacity = capacity_bytes
        self._curve = curve
        self._identity = own_identity()
        self._token = secrets.token_bytes(16)
        self._roster = Roster(n_local + n_remote)
        self._error: TransportError | None = None  # why nothing can be sent any more
        self._ready = False  # every remote reader is there
        self._is_plain = False  # usable, and with local readers only
        self._messages = 0
        self._payload_bytes = 0
        self._waited_at = 0  # messages sent by the last wait for room in the ring
        self._waits = 0
        self._waited_s = 0.0
        self._longest_wait_s = 0.0

        self._room = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeper = Sleeper(self._room, self._on_event, queue=name)
        self._local: LocalReaders | None = None
        self._remote: RemoteReaders | None = None
        try:
            if n_local:
                self._local = LocalReaders(
                    name, n_local, capacity_bytes, self._token, self._roster, self._room
                )
                self._sleeper.watch(self._local.news)
                self._condition = self._local.condition(self._sleeper, wait, clock)
                writer = self._local.writer
                self._try_write = writer.try_write
                self._max_payload = writer.max_payload
                self._piece_bytes = writer.piece_bytes
            if n_remote and remote_host is not None:
                from transport.remote import RemoteReaders

                self._remote = RemoteReaders(
                    name, remote_host, n_remote, capacity_bytes, self._token, self._roster, curve
                )
                self._sleeper.watch(self._remote.fd)
            self._is_plain = n_remote == 0
        except BaseException:
            self.close()
            raise

    def handle(self) -> Handle:
        curve = self._curve
        return Handle(
            name=self.name,
            n_readers=self._roster.n_readers,
            writer=self._identity,
            token=self._token,
            address=self._local.address if self._local is not None else "",
            endpoint=self._remote.endpoint if self._remote is not None else "",
            host=socket.gethostname(),
            window_bytes=self._capacity,
            curve_writer_public=curve.writer_public if curve is not None else "",
            curve_reader_public=curve.reader_public if curve is not None else "",
            curve_reader_secret=curve.reader_secret if curve is not None else "",
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while True:
            self.check_peers()
            missing = self._missing_ranks()
            if not missing:
                self._ready = True
                return
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

    def check_peers(self) -> None:
        self._raise_if_unusable()
        self._sleeper.sleep(0.0)
        if self._remote is not None:
            self._serve(self._remote)

    def enqueue(self, *parts: Buffer, timeout_s: float) -> None:
        if len(parts) == 1 and parts[0].__class__ is bytes:
            nbytes = len(parts[0])
        else:
            nbytes = sum(map(nbytes_of, parts))
        if self._is_plain:
            if nbytes > self._max_payload or not self._try_write(parts, nbytes):
                self._write(parts, nbytes, timeout_s)
        else:
            self._enqueue_anywhere(parts, nbytes, timeout_s)
        self._payload_bytes += nbytes
        self._messages = messages = self._messages + 1
        if not messages & 63:
            # A dead reader is noticed even while there is room. This message is out, so the next one says it.
            with contextlib.suppress(ReaderDied, Cancelled):
                self._sleeper.sleep(0.0)

    def cancel(self) -> None:
        self._is_plain = False
        self._sleeper.cancel()

    def close(self) -> None:
        if isinstance(self._error, QueueClosed):
            return
        self._fail(QueueClosed(self.name, "this end"))
        if os.getpid() == self._identity.pid:  # a forked child gives back its descriptors, no more
            if self._local is not None:
                self._local.finish()
            if self._remote is not None:
                self._remote.close()
        if self._local is not None:
            self._local.close()
        self._sleeper.close()
        os.close(self._room)

    @property
    def stats(self) -> QueueStats:
        stats = QueueStats(
            messages=self._messages,
            payload_bytes=self._payload_bytes,
            waits=self._waits,
            parks=self._waits,
            waited_s=self._waited_s,
            longest_wait_s=self._longest_wait_s,
        )
        if self._local is None:
            return stats
        ring = self._condition
        return QueueStats(
            messages=stats.messages,
            payload_bytes=stats.payload_bytes,
            waits=stats.waits + ring.waits,
            parks=stats.parks + ring.parks,
            wakes=self._local.writer.wakes,
            waited_s=stats.waited_s + ring.waited_s,
            longest_wait_s=max(stats.longest_wait_s, ring.longest_wait_s),
        )

    def _enqueue_anywhere(self, parts: Sequence[Buffer], nbytes: int, timeout_s: float) -> None:
        self._raise_if_unusable()
        if self._remote is not None:
            self._wait_for_window(self._remote, nbytes, timeout_s)
        if self._local is not None:
            self._write(parts, nbytes, timeout_s)
        if self._remote is not None:  # last, because only this cannot fail any more
            self._remote.send(parts, nbytes)

    def _write(self, parts: Sequence[Buffer], nbytes: int, timeout_s: float) -> None:
        """Into the ring, waiting for room as long as allowed."""
        deadline = self._clock.monotonic() + timeout_s
        if nbytes <= self._max_payload:
            self._write_record(parts, nbytes, deadline, timeout_s)
            return
        for kind, piece, size in pieces(parts, nbytes, self._piece_bytes):
            self._write_record(piece, size, deadline, timeout_s, kind)

    def _write_record(
        self, parts: Sequence[Buffer], nbytes: int, deadline: float, timeout_s: float, kind: int = DATA
    ) -> None:
        """If the deadline passes between two pieces of a large message, the readers drop what they have of
        it when the next message begins.
        """
        local, start, warn_after = self._local, self._clock.monotonic(), self._warn_after_s
        assert local is not None
        writer = local.writer
        while True:
            reader, head = writer.slowest()
            old = writer.word(head)  # read before trying, so that room made after the try changes it
            if writer.try_write(parts, nbytes, kind):
                return
            # At each turn, because a reader that moves may still take too long to make enough room.
            self._sleeper.raise_if_cancelled()
            now = self._clock.monotonic()
            if now >= min(deadline, start + warn_after):
                rank, pid = local.who(reader) or (self._missing_ranks()[0], None)
                if now >= deadline:
                    raise QueueFull(self.name, rank, pid, *writer.lag(reader), timeout_s)
                self._warn(rank, pid, *writer.lag(reader), now - start)
                warn_after *= 2
            if any(writer.word(head) != old for _ in self._condition.polls):
                continue
            quick, self._waited_at = self._messages - self._waited_at, self._messages
            self._condition.wait(head, old, min(deadline, start + warn_after), quick)

    def _wait_for_window(self, remote: RemoteReaders, nbytes: int, timeout_s: float) -> None:
        """Wait until every remote reader is there and may be sent another `nbytes` bytes."""
        if not self._ready:
            self.wait_until_ready(timeout_s)  # whoever subscribes later would miss this message
        if self._has_window(remote, nbytes):
            return
        start, warn_after = self._clock.monotonic(), self._warn_after_s
        self._waits += 1
        try:
            while not self._has_window(remote, nbytes):
                now = self._clock.monotonic()
                rank, pid, messages, behind = remote.slowest()
                if now >= start + timeout_s:
                    raise QueueFull(self.name, rank, pid, messages, behind, timeout_s)
                if now - start >= warn_after:
                    self._warn(rank, pid, messages, behind, now - start)
                    warn_after *= 2
                self._sleeper.sleep(start + min(timeout_s, warn_after) - now)
        finally:
            waited = self._clock.monotonic() - start
            self._waited_s += waited
            self._longest_wait_s = max(self._longest_wait_s, waited)

    def _has_window(self, remote: RemoteReaders, nbytes: int) -> bool:
        try:
            return remote.has_room(nbytes)
        except ReaderDied as error:
            raise self._fail(error) from None

    def _warn(self, rank: int, pid: int | None, messages: int, nbytes: int, waited_s: float) -> None:
        logger.warning(
            "queue %r has been full for %.1f s: reader rank %d (%s) is %d messages (%d bytes) behind",
            self.name,
            waited_s,
            rank,
            "never attached" if pid is None else f"pid {pid}",
            messages,
            nbytes,
        )

    def _missing_ranks(self) -> tuple[int, ...]:
        here = set() if self._local is None else self._local.ranks()
        if self._remote is not None:
            here |= self._remote.ranks()
        return tuple(rank for rank in range(self._roster.n_readers) if rank not in here)

    def _on_event(self, fd: int) -> None:
        if self._remote is not None and fd == self._remote.fd:
            self._serve(self._remote)
        elif self._local is not None:
            if fd == self._local.news:
                self._local.admit(self._sleeper)
            else:
                raise self._fail(self._local.obituary(fd))

    def _serve(self, remote: RemoteReaders) -> None:
        try:
            remote.serve()
        except ReaderDied as error:
            raise self._fail(error) from None

    def _fail(self, error: TransportError) -> TransportError:
        """From now on nothing can be sent, because of this."""
        self._error = error
        self._is_plain = False
        return error

    def _raise_if_unusable(self) -> None:
        if self._sleeper.cancelled and not isinstance(self._error, QueueClosed):
            raise Cancelled(self.name)
        if self._error is not None:
            raise self._error.with_traceback(None)  # raised again and again, it would grow
