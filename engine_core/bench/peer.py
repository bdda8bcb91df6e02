"""vLLM measured beside us, by a script that needs nothing of this package, in an interpreter that has it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

PEER_TIMEOUT_S = 1800.0


def measure_vllm(python: str, script: str, *args: str) -> dict[str, float]:
    """The figures that `script`, a file of this directory, prints as one JSON object.

    Raises RuntimeError with the script's last words if it fails.
    """
    command = [python, str(Path(__file__).with_name(script)), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S)
    if done.returncode:
        last_words = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
        raise RuntimeError(f"{python} {script}: {last_words}\n{done.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
