"""What processes that were started under a mark have left: processes, files, shared memory, sockets.

The mark is a variable of the environment, which children inherit; nothing else on the host is looked at.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

VARIABLE = "ENGINE_CORE_CHAOS"


class Mark:
    """Marks all that this process starts from now on; `directory` is where they put temporary files."""

    def __init__(self, directory: Path) -> None:
        self._value = uuid.uuid4().hex
        self._directory = directory
        self._shared_memory = _shared_memory()
        os.environ[VARIABLE] = self._value

    def remove(self) -> None:
        del os.environ[VARIABLE]

    def processes(self) -> dict[int, str]:
        """The marked processes but this one, by pid: command lines. Zombies do not count."""
        marked = {}
        wanted = f"{VARIABLE}={self._value}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    marked[int(entry.name)] = command.strip()
        return marked

    def leftovers(self) -> list[str]:
        """A line for each thing that is there now."""
        found = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        found += [f"file {path}" for path in self._directory.rglob("*") if not path.is_dir()]
        found += [f"shared memory /dev/shm/{name}" for name in sorted(_shared_memory() - self._shared_memory)]
        return found


def _shared_memory() -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return {name for name in os.listdir("/dev/shm") if name.startswith(("engine-core", "engine_core"))}
    return set()
