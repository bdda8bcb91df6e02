"""Processes as the kernel knows them: identities, deaths, and private directories that do not outlive their
owner.

A pid alone is ambiguous, because pids are reused; a pid with its start time is not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import re
import select
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from transport.errors import PathTooLong, TransportError

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


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends.

    `parent_pid` is the parent as the child was told: if it is gone already, the process ends here and now.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


# Private directories
#
#   <tmp>/engine-core-<uid>/                  0700, shared by all processes of the user
#       .lock                                 flock: exclusive while directories are made or swept
#       <pid>-<start ticks>/                  0700, one per process that asked
#           .alive                            flock: held by the owner for its whole life
#
# A directory is stale when its owner is dead by pid and start time *and* the lock is free. The lock is what
# counts when /tmp is shared between pid namespaces, where a living owner may have no pid that we can see.

_OWNER = re.compile(r"^(\d+)-(\d+)$")
_own: tuple[int, Path, int] | None = None  # (pid, path, descriptor of .alive)


def base_dir() -> Path:
    """`<tmp>/engine-core-<uid>`, made if absent. Raises TransportError if somebody else could get in."""
    path = Path(tempfile.gettempdir()) / f"engine-core-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise TransportError(f"{path} must be a directory of user {os.getuid()} with mode 0700; remove it")
    return path


def run_dir() -> Path:
    """This process's private directory, removed at its end; a child made by fork gets one of its own."""
    global _own
    if _own is not None and _own[0] == os.getpid():
        return _own[1]
    identity = own_identity()
    base = base_dir()
    with _locked(base):
        path = base / f"{identity.pid}-{identity.start_ticks}"
        path.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path / ".alive", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _own = (identity.pid, path, fd)
    atexit.register(remove_run_dir)
    return path


def remove_run_dir() -> None:
    """Remove this process's directory now, if it has one. Called at exit."""
    global _own
    if _own is None or _own[0] != os.getpid():
        return
    _, path, fd = _own
    _own = None
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def sweep_stale() -> list[Path]:
    """Remove what dead processes of this user left behind; returns the directories removed."""
    base = base_dir()
    with _locked(base):
        stale = _stale(base)
        for path in stale:
            shutil.rmtree(path)
    return stale


def find_stale() -> list[Path]:
    """The directories that `sweep_stale` would remove."""
    base = base_dir()
    with _locked(base):
        return _stale(base)


def _stale(base: Path) -> list[Path]:
    stale = []
    for path in base.iterdir():
        match = _OWNER.match(path.name)
        if match is None or ProcessIdentity(int(match[1]), int(match[2])).is_alive() or _is_held(path):
            continue
        stale.append(path)
    return stale


def socket_path(name: str) -> Path:
    """A path for a unix socket in `run_dir()`. Raises PathTooLong, which names TMPDIR, if the kernel would
    refuse it.
    """
    path = run_dir() / name
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise PathTooLong(str(path), SOCKET_PATH_LIMIT)
    return path


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    fd = os.open(base / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path / ".alive", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
