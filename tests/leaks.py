"""What a test run left behind: processes, socket files, shared memory, open sockets.

Other runs on the same machine are not looked at: a process is ours if it descends from this one or
inherited its marker, a file if it lies in the run's private temporary directory, and sockets and mappings
are read from this process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import uuid
from pathlib import Path

import psutil

MARKER = "ENGINE_CORE_TEST_RUN"
GRACE_S = 5.0  # how long after its owner's death something of ours may still be there


class LeakCheck:
    """Marks what this process starts from now on, and finds what is left of it."""

    def __init__(self, tmp: Path) -> None:
        self.run = uuid.uuid4().hex
        self.tmp = tmp
        os.environ[MARKER] = self.run
        self._shm_before = _shm_names()

    def leftovers(self, grace_s: float = GRACE_S) -> list[str]:
        """One line for each thing that is still there after a grace period; empty if all is clean."""
        gc.collect()
        deadline = time.monotonic() + grace_s
        while found := self._scan():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return found

    def _scan(self) -> list[str]:
        return [*self._processes(), *self._files(), *self._shared_memory(), *_own_sockets(), *_own_segments()]

    def _processes(self) -> list[str]:
        """By marker or descent; names the test that started it where its environment tells."""
        me = os.getpid()
        found = {child.pid: child for child in psutil.Process().children(recursive=True)}
        marker = f"{MARKER}={self.run}".encode()
        environments: dict[int, bytes] = {}
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                environments[pid] = Path(f"/proc/{pid}/environ").read_bytes()
        lines = []
        for pid, environment in environments.items():
            variables = environment.split(b"\0")
            if pid == me or (pid not in found and marker not in variables):
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                test = [v.partition(b"=")[2] for v in variables if v.startswith(b"PYTEST_CURRENT_TEST=")]
                started_by = f", started by {test[0].decode()}" if test else ""
                command = " ".join(process.cmdline())[:200] or process.name()
                lines.append(f"process {pid} ({process.status()}{started_by}): {command}")
        return lines

    def _files(self) -> list[str]:
        """Files and sockets."""
        theirs = "vllm-rs-"  # the Rust front end's own sockets
        return [
            f"file {path}"
            for path in self.tmp.rglob("*")
            if not path.is_dir() and not path.name.startswith(theirs)
        ]

    def _shared_memory(self) -> list[str]:
        return [f"shared memory /dev/shm/{name}" for name in sorted(_shm_names() - self._shm_before)]


def _shm_names() -> set[str]:
    """Names in /dev/shm that look like ours or like Python's shared memory and semaphores."""
    ours = ("engine-core", "engine_core", "psm_", "sem.")
    return {name for name in os.listdir("/dev/shm") if name.startswith(ours)}


def _own_sockets() -> list[str]:
    """Named unix sockets that this process still holds."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    names = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[6] in inodes and "engine-core" in fields[7]:
            names.append(f"open socket {fields[7]}")
    return names


def _own_segments() -> list[str]:
    """Memory files of ours that this process still maps or holds."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:engine-core" in line:
            found.add(f"mapped segment {line.split(maxsplit=5)[5]}")
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "memfd:engine-core" in target:
                found.add(f"open segment {target}")
    return sorted(found)
