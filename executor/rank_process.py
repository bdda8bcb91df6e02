"""One rank as its executor sees it: a child process and the descriptors that lead to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from executor.control import Failure, FromRank, RankHungUp, control_pair, receive_from_rank
from executor.spawning import module_command, module_environment
from transport.processes import kill_when_closed, what_keeps_it

# Faulthandler's, in every rank. A real-time signal, because workers and their libraries use the common ones.
STACK_SIGNAL = signal.SIGRTMIN + 7

_SETTLE_S = 0.02
_ENDING_S = 5.0  # an interpreter takes a while to take itself down
_STACK_WAIT_S = 0.5
_STACK_BYTES = 32 << 10


class RankProcess:
    """Starts `python -m executor.worker_proc` in a session of its own.

    The session keeps a terminal's Ctrl-C away, and lets `kill` reach what the worker itself started. The
    child is killed by the kernel when the thread that made this object ends, and when this process ends in
    any way.
    """

    def __init__(self, rank: int, page_fd: int, output_fd: int, collective_fds: Sequence[int] = ()) -> None:
        """`output_fd`: for what the rank writes to standard output and error."""
        self.rank = rank
        self.hung_up = False
        self.control, theirs = control_pair()
        death_reader, self._death_writer = os.pipe()
        self._stack_fd = os.memfd_create(f"stack-{rank}", os.MFD_CLOEXEC)
        fds = (theirs.fileno(), death_reader, page_fd, self._stack_fd, *collective_fds)
        try:
            self._popen = subprocess.Popen(
                module_command("executor.worker_proc", rank, *fds),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                pass_fds=fds,
                start_new_session=True,
                env=module_environment(),
            )
            kill_when_closed(death_reader, self._popen.pid)  # it may be stopped before it can ask for it
        except BaseException:
            self.control.close()
            os.close(self._death_writer)
            os.close(self._stack_fd)
            raise
        finally:
            theirs.close()
            os.close(death_reader)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)

    def packets(self) -> Iterator[FromRank]:
        """Those that are there. After the last one, `hung_up` tells that no more will come."""
        while not self.hung_up:
            try:
                packet = receive_from_rank(self.control)
            except RankHungUp:
                self.hung_up = True
                return
            except msgspec.DecodeError as error:
                packet = Failure(f"sent a packet that cannot be read: {error}")
            if packet is None:
                return
            yield packet

    def has_ended(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def exit_code(self) -> int | None:
        """As `subprocess` gives it, negative for a signal; None while it lives.

        Reaping gives the pid free for others, so what else runs in the session is killed before.
        """
        if self._popen.returncode is None and self.has_ended():
            self._kill_session(signal.SIGKILL)
        return self._popen.poll()

    def terminate(self) -> None:
        if self.exit_code() is None:
            self._popen.terminate()

    def kill(self) -> None:
        """End it and all that it started, at once."""
        if self._popen.returncode is None:
            self._kill_session(signal.SIGKILL)

    def _kill_session(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is not (or no longer) the leader of a session
            os.killpg(self.pid, signum)

    def state(self) -> str:
        """What keeps the kernel from running it, or an empty text."""
        return what_keeps_it(self.pid)

    def dump_stack(self) -> str:
        """Where its threads stand, by faulthandler; empty if it cannot be had. Waits up to half a second."""
        with contextlib.suppress(ProcessLookupError):
            os.ftruncate(self._stack_fd, 0)
            os.lseek(self._stack_fd, 0, os.SEEK_SET)
            signal.pidfd_send_signal(self.pidfd, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_WAIT_S
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, size = size, os.fstat(self._stack_fd).st_size
            if size and size == before:
                break
        return os.pread(self._stack_fd, _STACK_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """Give back the descriptors. The process has ended and was reaped."""
        self.control.close()
        os.close(self._death_writer)
        os.close(self._stack_fd)
        os.close(self.pidfd)


def first_cause(
    ranks: Sequence[RankProcess], reports: Callable[[], dict[int, Failure]]
) -> tuple[RankProcess, Failure | None] | None:
    """The rank that failed first and what it said, if anything; None if none failed.

    `reports` takes in the failures that ranks have told of since it was last called. A rank that dies without
    a word is the cause of what its peers report when they lose it, and they may be quicker: so a report waits
    for deaths.
    """
    told = reports()
    if not told and not any(process.hung_up or process.has_ended() for process in ranks):
        return None
    _wait_for_deaths([process for process in ranks if process.rank not in told])
    dead = [process for process in ranks if process.has_ended()]
    told.update(reports())
    for process in dead:
        if process.rank not in told:
            return process, None
    for rank, report in told.items():
        return ranks[rank], report
    for process in ranks:
        if process.hung_up:
            return process, Failure("closed its connection to the executor, but runs on")
    return None


def _wait_for_deaths(ranks: list[RankProcess]) -> None:
    """Until one of them has ended, but not long unless one is ending."""
    poller = select.poll()
    for process in ranks:
        poller.register(process.pidfd, select.POLLIN)
    poller.poll((_ENDING_S if any(process.hung_up for process in ranks) else _SETTLE_S) * 1000)
