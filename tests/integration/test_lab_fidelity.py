"""A simulation and a real engine whose mock workers take the same times agree."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engine_core.lab.load import GeneratedLoad, parse_lengths
from tests.conftest import RunCli

TOLERANCE = 0.05
# A real step also takes what the machine takes to give processes a processor: the worker after its sleep,
# then the engine, then the client. The test measures how late somebody alike is meanwhile.
TURNS_PER_STEP = 3
STEP_MS = 30
_WORK = bytes(400_000)  # to be hashed: some tenths of a millisecond


class Lateness:
    """How late a thread is that sleeps, then works a little, while this is entered. In milliseconds."""

    def __init__(self) -> None:
        self._took_ms: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            time.sleep(STEP_MS * 1e-3)
            hashlib.sha256(_WORK).digest()
            self._took_ms.append((time.monotonic() - begun) * 1e3)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, share: float) -> float:
        """The percentile, but at least the mean: latencies are sums of many such delays."""
        took = np.array(self._took_ms) - min(self._took_ms)
        return float(max(np.percentile(took, share), took.mean()))


def _write_trace(path: Path) -> None:
    load = GeneratedLoad(
        rate=18.0,
        num_requests=360,
        input_lengths=parse_lengths("lognormal:500:0.8"),
        output_lengths=parse_lengths("uniform:5:40"),
        seed=3,
    )
    with path.open("w") as file:
        for request in load:
            blocks = -(-request.input_length // 512)
            # The first blocks are everybody's.
            ids = [number if number < 1 else 1000 * request.row + number for number in range(blocks)]
            line = {
                "timestamp": round(request.arrival_s * 1e3),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": ids,
            }
            file.write(json.dumps(line) + "\n")


@pytest.mark.slow
def test_simulated_and_real_latencies_agree(tmp_path: Path, run_cli: RunCli) -> None:
    trace = tmp_path / "trace.jsonl"
    _write_trace(trace)
    options = ("--mock-step-ms", STEP_MS, "--mock-prefill-us-per-token", 10, "--mock-decode-us-per-seq", 200)
    options += ("--num-gpu-blocks-override", 20000, "--distributed-executor-backend", "mp", "--json")
    reports = []
    with Lateness() as lateness:
        for command in ("replay", "simulate"):
            done = run_cli(command, trace, *options)
            assert done.returncode == 0, done.stderr
            reports.append(json.loads(done.stdout))
    real, simulated = reports
    assert real["mismatched_tokens"] == 0
    for key in ("completed", "output_tokens", "preemptions"):
        assert real[key] == simulated[key], key
    assert abs(real["prefix_hit_tokens"] - simulated["prefix_hit_tokens"]) <= 512
    wrong = []
    for key, steps in (("ttft_ms", 4), ("itl_ms", 1)):
        for name, share in (("p50", 50.0), ("p99", 99.0)):
            ours, theirs = simulated[key][name], real[key][name]
            noise_ms = steps * TURNS_PER_STEP * lateness.at(share)
            line = f"{key} {name}: simulated {ours}, real {theirs}, of which noise may be {noise_ms:.1f}"
            print(line)
            if abs(ours - theirs) > TOLERANCE * theirs + noise_ms:
                wrong.append(line)
    assert not wrong
