"""What the tests of the engine process share: configurations, processes, and checks of tokens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine_core.config import EngineConfig
from engine_core.handshake import FrontEnd
from executor.mock_model import mock_tokens

ROOT = Path(__file__).parent.parent
VOCAB = 32000


def mock_config(*, num_blocks: int = 4096, max_model_len: int = 4096, **fields: Any) -> EngineConfig:
    """A small engine with mock workers. `step_ms` is the mock's time for a step."""
    options = {"mock_max_model_len": max_model_len}
    step_ms = fields.pop("step_ms", None)
    if step_ms is not None:
        options["mock_step_ms"] = step_ms
    return EngineConfig(
        num_gpu_blocks_override=num_blocks, worker_options=options, stop_grace_s=2.0, **fields
    )


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def expected(prompt_token_ids: Sequence[int], count: int) -> list[int]:
    """What the mock's model says after a prompt."""
    return [int(token) for token in mock_tokens(np.asarray(prompt_token_ids, np.int32), count, VOCAB)]


@contextlib.contextmanager
def engine_process(
    config: EngineConfig, front_end: FrontEnd | None = None, lobby: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """An engine in a process of its own; ended at the end, by force if need be."""
    arguments = [msgspec.json.encode(value).decode() for value in (config, front_end, lobby)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine_runner", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come true within {timeout_s:g} s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Zombies do not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children_of(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(name))
    return found
