"""What `--record` costs a decode step: `python -m benchmarks.recorder`.

Two engines without workers' time decode the same 256 requests in turns, one of them recorded. The figures are
the process's CPU time per step, the recorder's thread included: medians and quartiles over all turns.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path

import numpy as np

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.lab.latency import AffineLatency
from engine_core.lab.record import Header
from engine_core.lab.recorder import DecisionRecorder
from engine_core.lab.simulated_workers import SimulatedWorkers
from engine_core.lab.virtual_clock import VirtualClock
from engine_core.request import Request
from executor.base import EngineCapacity
from executor.sampling_params import SamplingParams

BATCH = 256
TURNS = 60
STEPS_PER_TURN = 300
CAPACITY = EngineCapacity(1 << 17, 32000, 1 << 15, "float32")


def make_core(config: EngineConfig, recorder: DecisionRecorder | None) -> EngineCore:
    clock = VirtualClock()
    workers = SimulatedWorkers(config.executor_config(), CAPACITY, AffineLatency(step_ms=1.0), clock)
    core = EngineCore(config, workers, clock, make_observer=None if recorder is None else lambda _: recorder)
    rng = np.random.default_rng(0)
    for row in range(BATCH):
        # Lengths differ, so that blocks fill at different steps.
        prompt = rng.integers(0, CAPACITY.vocab_size, 16 + row % 32).astype(np.int32)
        params = SamplingParams(max_tokens=30_000)
        core.add_request(Request(f"r{row}", prompt, params, block_hasher=core.scheduler.hasher))
    for _ in range(50):
        core.step_fn()
    return core


def turn_us(core: EngineCore) -> float:
    begun = time.process_time_ns()
    for _ in range(STEPS_PER_TURN):
        core.step_fn()
    return (time.process_time_ns() - begun) / STEPS_PER_TURN / 1e3


def main() -> None:
    config = EngineConfig(max_num_seqs=BATCH, max_num_batched_tokens=16384)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record"
        header = Header(engine_version="", started=0.0, config=config, capacity=CAPACITY)
        recorder = DecisionRecorder(str(path), header)
        plain, recorded = make_core(config, None), make_core(config, recorder)
        gc.freeze()  # as the engine process does
        gc.set_threshold(50_000, 10, 10)
        pairs = [(turn_us(plain), turn_us(recorded)) for _ in range(TURNS)]
        recorder.close()
        size = path.stat().st_size
    for name, values in (("plain", [a for a, _ in pairs]), ("recorded", [b for _, b in pairs])):
        low, middle, high = np.percentile(values, [25, 50, 75])
        print(f"{name:>9}: {middle:7.1f} us a step ({low:.1f} to {high:.1f})")
    costs = np.percentile([b - a for a, b in pairs], [25, 50, 75])
    print(f"     cost: {costs[1]:7.1f} us a step ({costs[0]:.1f} to {costs[2]:.1f})")
    print(f"     size: {size / (TURNS * STEPS_PER_TURN):7.0f} bytes a step")


if __name__ == "__main__":
    main()
