"""Identities and deaths."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transport import ProcessIdentity
from transport import processes as p

ROOT = Path(__file__).parent.parent.parent


def python(code: str, tmp: Path, **kwargs: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp)},
        **kwargs,  # type: ignore[call-overload]
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_an_identity_outlives_its_process_and_does_not_mean_the_next_one() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = p.identity_of(child.pid)
    assert identity.is_alive()
    assert not ProcessIdentity(identity.pid, identity.start_ticks - 1).is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive(), "a zombie is dead"
    child.wait()
    assert not identity.is_alive()
    with pytest.raises(ProcessLookupError):
        p.identity_of(child.pid)


def test_a_pidfd_tells_the_end_of_that_process_only() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = p.identity_of(child.pid)
    fd = p.pidfd_of(identity)
    assert not p.has_ended(fd)
    child.kill()
    child.wait()
    assert p.has_ended(fd)
    os.close(fd)
    for gone in (identity, ProcessIdentity(os.getpid(), 1)):
        with pytest.raises(ProcessLookupError):
            p.pidfd_of(gone)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    child = (
        "import os, time; from transport.processes import die_with_parent; die_with_parent(os.getppid()); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = python(code, tmp_path)
    grandchild = p.identity_of(int(first_line(parent)))
    fd = p.pidfd_of(grandchild)
    end(parent)
    assert select.select([fd], [], [], 5)[0]
    os.close(fd)


def test_a_child_whose_parent_is_gone_already_dies_at_once(tmp_path: Path) -> None:
    code = "from transport.processes import die_with_parent; die_with_parent(1 << 22); print('alive')"
    process = python(code, tmp_path)
    assert first_line(process) == ""
    assert process.wait(10) == -signal.SIGKILL
    end(process)
