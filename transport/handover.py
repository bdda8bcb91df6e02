"""How a reader of the same host gets at the ring: the writer hands its descriptors over a unix socket.

The writer listens on an abstract address (no file, so nothing can be left behind) until every local reader
has come. The kernel vouches for the peer's user, the token for its business. Both ends keep the connection:
it hangs up when the other process ends. A process's descriptor (pidfd) says the same even if a forked child
holds a copy of the socket.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass

import msgspec

from transport.clock import Clock
from transport.errors import AttachRefused, TransportTimeout, WriterDied
from transport.processes import ProcessIdentity, has_ended, pidfd_of
from transport.ring import ShmRingBuffer

logger = logging.getLogger("transport")

_VERSION = 1
_REQUEST_TIMEOUT_S = 1.0  # for a reader that connected to say who it is
_PEERCRED = struct.Struct("3i")  # pid, uid, gid


class _Request(msgspec.Struct, array_like=True):
    version: int
    token: bytes
    rank: int


class _Reply(msgspec.Struct, array_like=True):
    refused: str  # "" if welcome
    index: int = 0


class Roster:
    """Which ranks have a reader. Used by the writer's thread and by the reception's."""

    def __init__(self, n_readers: int) -> None:
        self._lock = threading.Lock()
        self._free = set(range(n_readers))
        self.n_readers = n_readers

    def claim(self, rank: int) -> str:
        """Take the place of `rank`. "" if that succeeded, else the reason."""
        if not 0 <= rank < self.n_readers:
            return f"the queue has ranks 0 to {self.n_readers - 1}"
        with self._lock:
            if rank not in self._free:
                return "this rank has attached already"
            self._free.remove(rank)
        return ""


@dataclass(slots=True)
class Arrival:
    """A local reader as the writer knows it. `index` is its place in the ring."""

    rank: int
    index: int
    pid: int
    pidfd: int
    connection: socket.socket

    def close(self) -> None:
        self.connection.close()
        os.close(self.pidfd)


class Reception:
    """The writer's side: a thread that lives until all `ring.n_readers` local readers have attached.

    `arrivals` are appended to by the thread and taken by the writer; `news` (an eventfd) is rung for each.
    """

    def __init__(
        self, ring: ShmRingBuffer, doorbells: list[int], writer_doorbell: int, token: bytes, roster: Roster
    ) -> None:
        self.address = f"engine-core/{os.getpid()}/{secrets.token_hex(16)}"
        self.arrivals: deque[Arrival] = deque()
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ring = ring
        self._doorbells = doorbells
        self._writer_doorbell = writer_doorbell
        self._token = token
        self._roster = roster
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._receive, name="transport-reception", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._listener.close()
        self._ring.close_fd()
        for arrival in self.arrivals:  # whom the writer has not taken over
            arrival.close()
        self.arrivals.clear()
        os.close(self._stop)
        os.close(self.news)

    def _receive(self) -> None:
        with self._listener:
            index = 0
            while index < self._ring.n_readers:
                ready, _, _ = select.select([self._listener.fileno(), self._stop], [], [])
                if self._stop in ready:
                    return
                connection, _ = self._listener.accept()
                try:
                    arrival = self._welcome(connection, index)
                except OSError as error:  # it hung up or kept silent; the next one may do better
                    logger.warning("a reader that was attaching went away: %s", error)
                    arrival = None
                if arrival is None:
                    connection.close()
                    continue
                index += 1
                self.arrivals.append(arrival)
                os.eventfd_write(self.news, 1)
        self._ring.close_fd()

    def _welcome(self, connection: socket.socket, index: int) -> Arrival | None:
        pid, uid = peer_of(connection)
        if uid != os.getuid():  # is owed no answer, and could keep others waiting for its request
            logger.warning("process %d of user %d was not attached to a queue", pid, uid)
            return None
        connection.settimeout(_REQUEST_TIMEOUT_S)
        rank = self._judge(connection.recv(4096))
        if isinstance(rank, str):
            logger.warning("process %d was not attached to a queue: %s", pid, rank)
            connection.send(msgspec.msgpack.encode(_Reply(rank)))
            return None
        pidfd = os.pidfd_open(pid)
        reply = msgspec.msgpack.encode(_Reply("", index))
        arrival = Arrival(rank, index, pid, pidfd, connection)
        # A reader that dies from here on is a dead reader: its place is taken and its connection hangs up.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(
                connection, [reply], [self._ring.fd, self._doorbells[index], self._writer_doorbell]
            )
        return arrival

    def _judge(self, data: bytes) -> int | str:
        """The rank that a request is for, or why it is refused."""
        try:
            request = msgspec.msgpack.decode(data, type=_Request)
        except msgspec.MsgspecError as error:
            return f"not a request to attach: {error}"
        if request.version != _VERSION:
            return f"it speaks version {request.version} of the transport, the writer {_VERSION}"
        if not hmac.compare_digest(request.token, self._token):
            return "wrong token"
        return self._roster.claim(request.rank) or request.rank


@dataclass(slots=True)
class Attachment:
    """What a reader got. It owns the descriptors."""

    ring: ShmRingBuffer
    index: int
    doorbell: int
    writer_doorbell: int
    writer_pidfd: int
    connection: socket.socket

    def close(self) -> None:
        self.ring.close()
        self.connection.close()
        for fd in (self.doorbell, self.writer_doorbell, self.writer_pidfd):
            os.close(fd)


def attach(
    address: str,
    token: bytes,
    writer: ProcessIdentity,
    rank: int,
    *,
    queue: str,
    timeout_s: float,
    clock: Clock,
) -> Attachment:
    """Ask the writer for the ring. Raises AttachRefused, WriterDied or TransportTimeout."""
    try:
        pidfd = pidfd_of(writer)
    except ProcessLookupError:
        raise WriterDied(queue, writer.pid) from None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, pidfd)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(connection.close)
        try:
            data, fds = _exchange(connection, address, _Request(_VERSION, token, rank), timeout_s, clock)
        except TimeoutError:
            raise TransportTimeout(
                f"the writer (pid {writer.pid}) of queue {queue!r} did not let rank {rank} attach "
                f"within {timeout_s:g} s",
                queue=queue,
                waited_s=timeout_s,
            ) from None
        except ConnectionError:
            if has_ended(pidfd):
                raise WriterDied(queue, writer.pid) from None
            reason = "nobody listens there: all its readers have attached, or the queue was closed"
            raise AttachRefused(queue, rank, reason) from None
        for fd in fds:
            undo.callback(os.close, fd)
        reply = msgspec.msgpack.decode(data, type=_Reply)
        if reply.refused:
            raise AttachRefused(queue, rank, reply.refused)
        if len(fds) != 3:
            raise AttachRefused(
                queue, rank, "the descriptors did not arrive: too many open files in this process?"
            )
        ring = ShmRingBuffer.from_fd(fds[0])
        undo.pop_all()
        ring.close_fd()
        return Attachment(ring, reply.index, fds[1], fds[2], pidfd, connection)


def _exchange(
    connection: socket.socket, address: str, request: _Request, timeout_s: float, clock: Clock
) -> tuple[bytes, list[int]]:
    """Send the request, receive the reply and its descriptors. Raises TimeoutError or ConnectionError."""
    deadline = clock.monotonic() + timeout_s
    connection.settimeout(max(timeout_s, 1e-3))
    connection.connect("\0" + address)
    _, uid = peer_of(connection)
    if uid != os.getuid():
        raise ConnectionError(f"user {uid} has taken the address")
    connection.send(msgspec.msgpack.encode(request))
    connection.settimeout(max(deadline - clock.monotonic(), 1e-3))
    data, fds, _, _ = socket.recv_fds(connection, 4096, 3, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("the writer hung up")
    return data, fds


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end when it connected or listened, as the kernel saw it."""
    pid, uid, _ = _PEERCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    )
    return pid, uid
