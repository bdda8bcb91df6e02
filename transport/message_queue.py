"""`MessageQueue`: one writer, N readers, each of which reads every message once and in order.

The writer `create`s the queue and gives its `handle()`, which is plain data, to the readers by any trusted
way; each reader `attach`es with its rank. Readers of the same host read a ring in shared memory, in place;
readers elsewhere get the same bytes in the same order over TCP. Nothing is ever dropped: a full queue makes
the writer wait for the slowest reader.

Every call that waits takes a deadline and raises an error that names who was waited for. A peer's death ends
a wait within milliseconds. One thread at a time uses an end; `cancel()` and `stats` may be called from any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from transport.clock import SYSTEM_CLOCK, Clock
from transport.errors import TransportError
from transport.processes import ProcessIdentity
from transport.waiting import WaitPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.ring import Buffer

NO_MESSAGE = memoryview(b"")


def _nothing() -> None:
    pass


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Two key pairs (Z85 text) that encrypt and authenticate a queue's TCP connections: the writer's and
    the readers'.
    """

    writer_public: str
    writer_secret: str
    reader_public: str
    reader_secret: str

    def __repr__(self) -> str:
        return f"CurveKeys(writer_public={self.writer_public!r}, reader_public={self.reader_public!r})"

    @classmethod
    def generate(cls) -> CurveKeys:
        """New keys. Raises TransportError if libzmq was built without CURVE."""
        import zmq

        if not zmq.has("curve"):
            raise TransportError("this libzmq has no CURVE encryption")
        writer_public, writer_secret = zmq.curve_keypair()
        reader_public, reader_secret = zmq.curve_keypair()
        return cls(
            writer_public=writer_public.decode(),
            writer_secret=writer_secret.decode(),
            reader_public=reader_public.decode(),
            reader_secret=reader_secret.decode(),
        )


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs to attach. Plain data for msgspec; whoever holds it can attach, so treat it as a
    secret.
    """

    name: str
    n_readers: int
    writer: ProcessIdentity
    token: bytes
    address: str  # abstract unix socket of the writer; "" without local readers
    endpoint: str  # ZMQ address of the writer; "" without remote readers
    host: str  # the writer's, for messages to people
    window_bytes: int  # how far a remote reader may be behind
    curve_writer_public: str = ""  # "": not encrypted
    curve_reader_public: str = ""
    curve_reader_secret: str = ""

    def __repr__(self) -> str:  # without the secrets, because logs are not
        return f"Handle(name={self.name!r}, n_readers={self.n_readers}, writer={self.writer})"


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one end since it was made."""

    messages: int
    payload_bytes: int
    waits: int  # for room or for a message, longer than a first look
    parks: int  # of these waits, those that slept
    waited_s: float  # in all these waits
    longest_wait_s: float
    wakes: int = 0  # sleeping peers rung, on the same host


class Message:
    """A received message. Use as a context manager: leaving it, by whatever way, gives the memory back to the
    writer.
    """

    __slots__ = ("_release", "view")

    def __init__(self, release: Callable[[], None]) -> None:
        self.view = NO_MESSAGE  # read-only, 8-byte aligned; arrays made from it are valid until release, too
        self._release = release

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    @property
    def is_held(self) -> bool:
        return self.view is not NO_MESSAGE

    def release(self) -> None:
        """Idempotent."""
        if self.view is not NO_MESSAGE:
            self.view = NO_MESSAGE
            self._release()

    def abandon(self) -> None:
        """Keep the view but give nothing back any more: the queue is being closed."""
        self._release = _nothing


class MessageQueue(ABC):
    """One end of a queue: the writer's from `create`, a reader's from `attach`."""

    name: str

    @classmethod
    def create(
        cls,
        *,
        n_local: int,
        n_remote: int = 0,
        name: str = "queue",
        capacity_bytes: int = 4 << 20,
        remote_host: str | None = None,
        curve: CurveKeys | None = None,
        wait: WaitPolicy | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> MessageQueue:
        """The writer's end, for `n_local` readers on this host and `n_remote` elsewhere.

        capacity_bytes: how far the slowest reader may be behind, in bytes. Messages may be larger.
        remote_host: the address of this host, IPv4 or IPv6, at which remote readers connect. curve: encrypt
        these connections.
        """
        from transport.queue_writer import QueueWriter

        return QueueWriter(
            n_local=n_local,
            n_remote=n_remote,
            name=name,
            capacity_bytes=capacity_bytes,
            remote_host=remote_host,
            curve=curve,
            wait=wait or WaitPolicy(),
            clock=clock,
        )

    @classmethod
    def attach(
        cls,
        handle: Handle,
        rank: int,
        *,
        remote: bool = False,
        timeout_s: float,
        wait: WaitPolicy | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> MessageQueue:
        """The end of reader `rank` (0 to n - 1, each once). remote: over TCP, from any host.

        It reads every message from the first, even those sent before it attached. Raises AttachRefused,
        WriterDied, TransportTimeout.
        """
        if remote:
            from transport.remote import RemoteReader

            return RemoteReader(handle, rank, timeout_s=timeout_s, clock=clock)
        from transport.local import LocalReader

        return LocalReader(handle, rank, timeout_s=timeout_s, wait=wait or WaitPolicy(), clock=clock)

    def handle(self) -> Handle:
        """What readers need to attach."""
        raise self._wrong_end("reads")

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all readers have attached. Raises TransportTimeout naming the missing ranks, ReaderDied,
        Cancelled.
        """
        raise self._wrong_end("reads")

    def check_peers(self) -> None:
        """Raise ReaderDied or WriterDied if a peer is gone; does not wait."""
        raise NotImplementedError

    def enqueue(self, *parts: Buffer, timeout_s: float) -> None:
        """Send one message: the bytes of all parts, one after the other. They are copied once.

        Returns when the message is published, not when it is read. Raises QueueFull (the message was not
        sent), ReaderDied, Cancelled, QueueClosed.
        """
        raise self._wrong_end("reads")

    def dequeue(self, timeout_s: float) -> Message:
        """The next message, in place. It must be released before the next call; the object is used again.

        `math.inf` is allowed where the writer's death is the only end of the wait that makes sense. Raises
        TransportTimeout, WriterDied or QueueClosed once all that was published has been read, Cancelled,
        MessageLost.
        """
        raise self._wrong_end("writes")

    def dequeue_copy(self, timeout_s: float) -> bytes:
        """The next message as bytes of its own, 8-byte aligned. Raises as `dequeue` does."""
        with self.dequeue(timeout_s) as message:
            return message.view.tobytes()

    @abstractmethod
    def cancel(self) -> None:
        """From any thread: end the other's wait at once, and every later call, with Cancelled."""

    @abstractmethod
    def close(self) -> None:
        """Tell the peers and give everything back. Idempotent. Not while another thread waits: `cancel()` it
        first.
        """

    @property
    @abstractmethod
    def stats(self) -> QueueStats: ...

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wrong_end(self, does: str) -> TransportError:
        return TransportError(f"this end of queue {self.name!r} {does}")
