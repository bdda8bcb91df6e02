"""Processes as the kernel knows them: identities and deaths.

A pid alone is ambiguous, because pids are reused; a pid with its start time is not.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
from pathlib import Path

import msgspec

SOCKET_PATH_LIMIT = 107  # bytes of sockaddr_un.sun_path without the closing NUL
_PR_SET_PDEATHSIG = 1


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process, for ever. `start_ticks`: when it started, in clock ticks since boot (/proc/PID/stat)."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        found = _read_stat(self.pid)
        return found is not None and found == ("R", self.start_ticks)


def identity_of(pid: int) -> ProcessIdentity:
    """Raises ProcessLookupError if there is no such process."""
    found = _read_stat(pid)
    if found is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(pid, found[1])


def own_identity() -> ProcessIdentity:
    return identity_of(os.getpid())


_STATES = {
    "D": "D (waiting for a device)",
    "T": "T (stopped)",
    "t": "t (stopped by a debugger)",
    "Z": "Z (ended)",
}


def what_keeps_it(pid: int) -> str:
    """What keeps the kernel from running a process, such as `T (stopped)`; empty if nothing does, or if there
    is none.
    """
    try:
        data = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return _STATES.get(data[data.rindex(")") + 2], "")


def _read_stat(pid: int) -> tuple[str, int] | None:
    """("R" or "Z", start ticks): "Z" for zombies and the dead, "R" for any other state."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = data[data.rindex(b")") + 2 :].split()  # the name before it may hold blanks and brackets
    return ("Z" if fields[0] in (b"Z", b"X") else "R"), int(fields[19])


def pidfd_of(identity: ProcessIdentity) -> int:
    """A descriptor that turns readable when the process ends. Raises ProcessLookupError if it already has.

    The start time is compared after opening, so the descriptor can never mean a later process with the same
    pid.
    """
    fd = os.pidfd_open(identity.pid)
    if identity.is_alive():
        return fd
    os.close(fd)
    raise ProcessLookupError(f"process {identity.pid} has ended")


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def kill_when_closed(fd: int, pid: int) -> None:
    """Have the kernel kill process `pid` when the writing end of the pipe `fd` is closed, whatever it does
    then: this process itself, or a child that has `fd` too.

    PR_SET_PDEATHSIG follows the parent's thread, and is the child's to ask for; this follows the parent's
    process, from the very start, and no thread of ours has to be able to run.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:
        os.kill(pid, signal.SIGKILL)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends.

    `parent_pid` is the parent as the child was told: if it is gone already, the process ends here and now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)
