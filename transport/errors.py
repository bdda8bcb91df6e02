"""What can go wrong between processes. Every error names the queue and the peer in fields as well as in its
text.
"""

from __future__ import annotations


class TransportError(Exception):
    """Base of all errors of this package."""


class TransportTimeout(TransportError, TimeoutError):
    """A deadline passed. `waited_s` is the time allowed; `missing_ranks` are the readers that never attached,
    if any.
    """

    def __init__(
        self, message: str, *, queue: str, waited_s: float, missing_ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.queue = queue
        self.waited_s = waited_s
        self.missing_ranks = missing_ranks


class QueueFull(TransportTimeout):
    """The slowest reader did not make room within the deadline. The message was not sent; it may be sent
    again.

    `pid` is None when the reader `rank` never attached.
    """

    def __init__(
        self, queue: str, rank: int, pid: int | None, lag_messages: int, lag_bytes: int, waited_s: float
    ) -> None:
        reader = (
            f"reader rank {rank} (pid {pid})"
            if pid is not None
            else f"reader rank {rank}, which never attached,"
        )
        super().__init__(
            f"queue {queue!r} is full: {reader} is {lag_messages} messages ({lag_bytes} bytes) behind "
            f"and made no room within {waited_s:g} s",
            queue=queue,
            waited_s=waited_s,
        )
        self.rank = rank
        self.pid = pid
        self.lag_messages = lag_messages
        self.lag_bytes = lag_bytes


class PeerDied(TransportError):
    """A process at the other end is gone, or closed its end. `pid` is its process id."""

    def __init__(self, message: str, *, queue: str, pid: int) -> None:
        super().__init__(message)
        self.queue = queue
        self.pid = pid


class ReaderDied(PeerDied):
    """A reader is gone: the writer cannot deliver to all any more. `closed`: it closed its end, its process
    may live.
    """

    def __init__(self, queue: str, rank: int, pid: int, *, closed: bool = False, host: str = "") -> None:
        where = f"pid {pid} on {host}" if host else f"pid {pid}"
        what = "closed its end" if closed else "died" if not host else "died or cannot be reached"
        super().__init__(f"reader rank {rank} ({where}) of queue {queue!r} {what}", queue=queue, pid=pid)
        self.rank = rank
        self.closed = closed
        self.host = host


class WriterDied(PeerDied):
    """The writer is gone without closing the queue; everything it had published has been read."""

    def __init__(self, queue: str, pid: int, *, host: str = "") -> None:
        where = f"pid {pid} on {host}" if host else f"pid {pid}"
        what = "died" if not host else "died or cannot be reached"
        super().__init__(f"the writer ({where}) of queue {queue!r} {what}", queue=queue, pid=pid)
        self.host = host


class RankDied(PeerDied):
    """A rank that others exchange arrays with is gone."""

    def __init__(self, collective: str, rank: int, pid: int) -> None:
        super().__init__(f"rank {rank} (pid {pid}) of {collective!r} died", queue=collective, pid=pid)
        self.rank = rank


class CallMismatch(TransportError):
    """Two ranks exchange arrays of different kinds or sizes: their calls are not the same."""

    def __init__(self, collective: str, rank: int, other: int, sequence: int) -> None:
        super().__init__(
            f"rank {rank} and rank {other} of {collective!r} make different calls at exchange {sequence}: "
            f"all ranks must call the same with arrays of the same shape and type"
        )
        self.collective = collective
        self.rank = rank
        self.other = other
        self.sequence = sequence


class QueueClosed(TransportError):
    """This end was closed, or the writer closed the queue and everything it had published has been read."""

    def __init__(self, queue: str, by: str) -> None:
        super().__init__(f"queue {queue!r} was closed by {by}")
        self.queue = queue


class Cancelled(TransportError):
    """`cancel()` was called on this end."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"this end of queue {queue!r} was cancelled")
        self.queue = queue


class MessageLost(TransportError):
    """A remote reader saw a gap: messages `expected` to `received - 1` never came."""

    def __init__(self, queue: str, expected: int, received: int) -> None:
        super().__init__(
            f"queue {queue!r} lost {received - expected} messages: "
            f"expected number {expected}, received {received}"
        )
        self.queue = queue
        self.expected = expected
        self.received = received


class AttachRefused(TransportError):
    """The writer (or the kernel on its behalf) did not let this process attach. `reason` says why."""

    def __init__(self, queue: str, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} cannot attach to queue {queue!r}: {reason}")
        self.queue = queue
        self.rank = rank
        self.reason = reason


class CodecError(TransportError, ValueError):
    """Bytes that `codec.encode` did not make, or arrays that it cannot carry."""
