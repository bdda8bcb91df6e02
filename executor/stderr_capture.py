"""What the ranks write to standard error and output: passed on to standard error line by line, and its end
kept as evidence.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque

from transport.clock import SYSTEM_CLOCK
from transport.unblocked import write_some

_CHUNK = 64 << 10
_TAIL_LINES = 20
_TAIL_BYTES = 8 << 10
_LONGEST_LINE = 8 << 10
_MOST_UNWRITTEN = 256 << 10  # of a rank, while nobody reads our own stderr; then lines are lost
_RETRY_MS = 50
_LAST_WRITE_S = 1.0


class _Stream:
    def __init__(self, fd: int, prefix: bytes) -> None:
        self.fd = fd
        self.prefix = prefix
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self.partial = b""
        self.unwritten = b""  # read, not yet passed on
        self.num_lost = 0  # lines, since the last that was passed on
        self.open = True


class StderrCapture:
    """Reads the ends of the ranks' stderr pipes in a thread of its own. If nobody reads what it passes on,
    lines are lost, but no rank has to wait.

    `tail(rank)` also takes in what a process wrote just before it died.
    """

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()  # over reading; writing on happens outside
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="worker-stderr", daemon=True)

    def add(self, fd: int, prefix: str) -> None:
        """Take over the reading end of the next rank's pipe. Before `start`."""
        os.set_blocking(fd, False)
        self._streams.append(_Stream(fd, prefix.encode()))

    def start(self) -> None:
        self._thread.start()

    def tail(self, rank: int) -> str:
        """The last lines that the rank wrote."""
        stream = self._streams[rank]
        with self._lock:
            self._read(stream)
            lines = [*stream.tail, stream.partial] if stream.partial else list(stream.tail)
        return b"\n".join(lines)[-_TAIL_BYTES:].decode(errors="replace")

    def stop(self) -> None:
        """Pass on what there is, within a second, and end. The ranks have ended."""
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        for stream in self._streams:
            os.close(stream.fd)
        os.close(self._stop)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        streams = {stream.fd: stream for stream in self._streams}
        for fd in streams:
            poller.register(fd, select.POLLIN)
        stopping = False
        while not stopping:
            is_behind = any(stream.unwritten for stream in self._streams)
            # No deadline if there is nothing to write: `stop` ends it.
            ready = {fd for fd, _ in poller.poll(_RETRY_MS if is_behind else None)}
            stopping = self._stop in ready
            for fd, stream in streams.items():
                was_open = stream.open
                if fd in ready or stopping:
                    with self._lock:
                        self._read(stream)
                        if stopping or not stream.open:
                            self._end_line(stream)
                self._pass_on(stream)
                if was_open and not stream.open:
                    poller.unregister(fd)
        give_up_s = SYSTEM_CLOCK.monotonic() + _LAST_WRITE_S
        for stream in self._streams:
            while stream.unwritten and (left_s := give_up_s - SYSTEM_CLOCK.monotonic()) > 0:
                self._pass_on(stream, left_s)

    def _pass_on(self, stream: _Stream, wait_s: float = 0.0) -> None:
        try:
            written = write_some(2, stream.unwritten, wait_s)
        except OSError:  # our own stderr is closed: there is nobody to tell
            written = len(stream.unwritten)
        if not written:
            return
        with self._lock:
            stream.unwritten = stream.unwritten[written:]
            if stream.num_lost:
                stream.unwritten += stream.prefix + b"... %d lines were lost\n" % stream.num_lost
                stream.num_lost = 0

    def _read(self, stream: _Stream) -> None:
        while stream.open:
            try:
                data = os.read(stream.fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                stream.open = False
                return
            *lines, stream.partial = (stream.partial + data).split(b"\n")
            for line in lines:
                self._take_line(stream, line)
            if len(stream.partial) > _LONGEST_LINE:
                self._end_line(stream)

    def _end_line(self, stream: _Stream) -> None:
        if stream.partial:
            self._take_line(stream, stream.partial)
            stream.partial = b""

    def _take_line(self, stream: _Stream, line: bytes) -> None:
        stream.tail.append(line)
        if len(stream.unwritten) < _MOST_UNWRITTEN:
            stream.unwritten += stream.prefix + line + b"\n"
        else:
            stream.num_lost += 1
