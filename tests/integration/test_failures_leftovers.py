"""SIGKILL of any process, or of any two, at any moment, leaves nothing after five seconds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines import ROOT, children_of, is_running
from tests.leaks import MARKER, LeakCheck

LIFE = """
import sys
from engine_core.client import EngineClient
from engine_core.errors import EngineDeadError
from executor.sampling_params import SamplingParams
from tests.engines import expected, mock_config, prompt
try:
    with EngineClient.launch(mock_config(tensor_parallel_size=2, step_ms=2)) as client:
        tokens = prompt(1, 20)
        stream = client.generate(tokens, SamplingParams(max_tokens=150))
        seen = [token for output in stream for token in output.new_token_ids]
        assert seen == expected(tokens, 150)
except EngineDeadError as error:
    print(str(error).splitlines()[0])
"""


def family_of(pid: int) -> list[int]:
    """A process, its engine and its ranks; stderr of all goes to the same file."""
    engines = children_of(pid)
    return [pid, *engines, *(rank for engine in engines for rank in children_of(engine))]


def live_and_kill(seed: int, tmp: Path) -> None:
    """One client with its engine and two ranks, from start to end; one or two are killed meanwhile."""
    rng = random.Random(seed)
    mark_of_run = os.environ[MARKER]
    check = LeakCheck(tmp)
    environment = {**os.environ, "TMPDIR": str(tmp)}
    os.environ[MARKER] = mark_of_run
    with subprocess.Popen(
        [sys.executable, "-c", LIFE], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as client:
        time.sleep(rng.uniform(0.2, 2.0))
        family = family_of(client.pid)
        victims = rng.sample(family, min(rng.choice([1, 1, 2]), len(family)))
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while is_running(client.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_running(client.pid), f"the client hangs after the kill of {victims} of {family}"
    leftovers = check.leftovers(grace_s=5.0)
    assert leftovers == [], f"seed {seed}: {victims} of {family} were killed"


@pytest.mark.parametrize("seed", range(8))
def test_kill_at_any_moment_leaves_nothing(seed: int, tmp_path: Path) -> None:
    live_and_kill(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_at_any_moment_leaves_nothing_100_times(tmp_path: Path) -> None:
    for seed in range(100, 200):
        live_and_kill(seed, tmp_path)
