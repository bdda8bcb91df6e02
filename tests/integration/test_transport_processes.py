"""Identities, deaths and private directories."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from transport import PathTooLong, ProcessIdentity, TransportError
from transport import processes as p

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tmpdir_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(p, "_own", None)
    yield tmp_path
    p.remove_run_dir()


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


def test_the_run_directory_is_private_and_carries_its_owners_identity(tmpdir_of_its_own: Path) -> None:
    path = p.run_dir()
    me = p.own_identity()
    assert path == tmpdir_of_its_own / f"engine-core-{os.getuid()}" / f"{me.pid}-{me.start_ticks}"
    for directory in (path, path.parent):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert p.run_dir() == path
    p.remove_run_dir()
    assert not path.exists()


def test_the_run_directory_goes_at_exit_but_not_with_a_forked_child(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from transport.processes import run_dir\n"
        "mine = run_dir()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert run_dir() != mine\n"
        "    sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(mine.exists(), len(list(mine.parent.iterdir())))"
    )
    process = python(code, tmp_path)
    assert first_line(process) == "True 2"  # .lock and its own
    assert process.wait(10) == 0
    assert [path.name for path in (tmp_path / f"engine-core-{os.getuid()}").iterdir()] == [".lock"]
    end(process)


def test_the_sweep_takes_directories_of_the_dead_and_nothing_else(tmpdir_of_its_own: Path) -> None:
    code = (
        "import time; from transport.processes import run_dir; print(run_dir(), flush=True); time.sleep(60)"
    )
    alive, dead = python(code, tmpdir_of_its_own), python(code, tmpdir_of_its_own)
    living, stale = Path(first_line(alive)), Path(first_line(dead))
    (stale / "socket").write_text("")
    dead.kill()
    dead.wait()
    others = [living.parent / name for name in ("vllm-1-2", "1-2-3", "notes")]
    for path in others:
        path.mkdir()
    mine = p.run_dir()
    assert p.sweep_stale() == [stale]
    assert not stale.exists()
    assert living.exists() and mine.exists() and all(path.exists() for path in others)
    end(alive)
    end(dead)


def test_the_sweep_spares_an_owner_it_cannot_see(tmpdir_of_its_own: Path) -> None:
    """In another pid namespace, but on this machine: it holds its lock."""
    unseen = p.base_dir() / "4194303-12345"
    unseen.mkdir()
    with open(unseen / ".alive", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert p.sweep_stale() == []
    assert p.sweep_stale() == [unseen]


def test_a_base_directory_that_others_could_enter_is_refused(tmpdir_of_its_own: Path) -> None:
    base = tmpdir_of_its_own / f"engine-core-{os.getuid()}"
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(TransportError, match="mode 0700"):
        p.run_dir()
    base.rmdir()
    base.symlink_to("/tmp")
    with pytest.raises(TransportError, match="must be a directory"):
        p.run_dir()


def test_a_socket_path_that_does_not_fit_names_tmpdir_and_the_limit(
    tmpdir_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmpdir_of_its_own / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(PathTooLong, match="TMPDIR") as caught:
        p.socket_path("socket")
    assert caught.value.limit == 107
    assert "107" in str(caught.value)
