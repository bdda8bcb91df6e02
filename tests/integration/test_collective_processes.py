"""Ranks in processes: sums through shared memory, deaths and stops at any point, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from transport.collective import CollectiveSegment

ROOT = str(Path(__file__).resolve().parents[2])

PRELUDE = """
import sys, time
import numpy as np
from transport.collective import Collective
from transport.errors import RankDied, TransportTimeout
rank, timeout_s, *fds = sys.argv[1:]
rank = int(rank)
end = Collective([int(fd) for fd in fds], rank, timeout_s=float(timeout_s))
def say(*words):
    print(*words, flush=True)
"""


class Group:
    """Three processes that run the same script."""

    def __init__(self, script: str, timeout_s: float = 20.0, chunk_bytes: int = 4096) -> None:
        segment = CollectiveSegment(3, chunk_bytes)
        code = PRELUDE + textwrap.dedent(script)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(timeout_s), *map(str, segment.fds)],
                pass_fds=segment.fds,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": ROOT},
            )
            for rank in range(3)
        ]
        segment.close()

    def lines(self, ranks: Sequence[int] = (0, 1, 2)) -> list[str]:
        """The next line of each."""
        return [self.processes[rank].stdout.readline().rstrip() for rank in ranks]  # type: ignore[union-attr]

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(signum)


@pytest.fixture
def start() -> Iterator[type[Group]]:
    groups = []

    class Started(Group):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            groups.append(self)

    before = set(os.listdir("/dev/shm"))
    yield Started
    for group in groups:
        for process in group.processes:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
    assert set(os.listdir("/dev/shm")) <= before


def test_random_calls_agree_with_numpy(start: type[Group]) -> None:
    group = start(
        """
        rng = np.random.default_rng(1)
        for i in range(400):
            shape = tuple(rng.integers(1, 60, size=rng.integers(1, 3)))
            arrays = rng.integers(-99, 99, size=(3, *shape)).astype(rng.choice(["f4", "f8", "i8"]))
            if rng.random() < 0.05:
                time.sleep(rng.random(3)[rank] * 0.02)  # let the others fall asleep
            if rng.random() < 0.7:
                mine = arrays[rank].copy()
                end.all_reduce(mine)
                assert (mine == arrays.sum(0)).all()
            else:
                assert (end.all_gather(arrays[rank]) == np.concatenate(list(arrays), axis=-1)).all()
        say("agreed")
        """
    )
    assert group.lines() == ["agreed"] * 3


LOOP = """
try:
    array = np.ones(2000)
    end.all_reduce(array)
    say("running")
    while True:
        array[:] = 1
        end.all_reduce(array)
        assert (array == 3).all()
except (RankDied, TransportTimeout) as error:
    say(type(error).__name__, error)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_a_killed_rank_is_named_by_the_others_at_once(start: type[Group], after_s: float) -> None:
    group = start(LOOP)
    assert group.lines() == ["running"] * 3
    time.sleep(after_s)
    group.kill(1)
    killed = time.monotonic()
    expected = f"RankDied rank 1 (pid {group.pid(1)}) of 'collective' died"
    assert group.lines([0, 2]) == [expected] * 2
    assert time.monotonic() - killed < 10
    for rank in (0, 2):
        assert group.processes[rank].wait(10) == 0


def test_a_rank_killed_while_the_others_sleep_is_named(start: type[Group]) -> None:
    group = start(
        LOOP.replace("    array[:] = 1\n", "    array[:] = 1\n        if rank == 2: time.sleep(60)\n")
    )
    assert group.lines() == ["running"] * 3
    time.sleep(0.3)
    group.kill(2)
    assert group.lines([0, 1]) == [f"RankDied rank 2 (pid {group.pid(2)}) of 'collective' died"] * 2


def test_a_stopped_rank_is_named_when_the_deadline_passes(start: type[Group]) -> None:
    group = start(LOOP, timeout_s=0.6)
    assert group.lines() == ["running"] * 3
    group.kill(0, signal.SIGSTOP)
    for line in group.lines([1, 2]):
        assert line.startswith(f"TransportTimeout rank 0 (pid {group.pid(0)}) of 'collective' did not come")
