"""What the executor itself costs: a call to all ranks, and a decode step whose worker does nothing.

python -m benchmarks.multiproc [--ranks 1 2 4] [--rows 256] [--seconds 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from executor.config import ExecutorConfig
from executor.multiproc import MultiprocExecutor
from executor.sampling_params import SamplingParams
from executor.step import NewRequest, SchedulerOutput


class DecodeSteps:
    """Steps of `rows` requests that decode one token each, for as long as one wants."""

    def __init__(self, rows: int, max_model_len: int, block_size: int) -> None:
        self._rows = rows
        self._max_model_len = max_model_len
        self._blocks_per_row = -(-max_model_len // block_size)
        self._slots = np.arange(rows, dtype=np.int32)
        self._ones = np.ones(rows, np.int32)
        self._computed = 0
        self._step_id = 0

    def next(self) -> SchedulerOutput:
        if self._computed in (0, self._max_model_len - 1):
            step = self._fresh()
        else:
            computed = np.full(self._rows, self._computed, np.int32)
            step = SchedulerOutput(self._step_id, self._slots, self._ones, computed)
            self._computed += 1
        self._step_id += 1
        return step

    def _fresh(self) -> SchedulerOutput:
        """All requests end, and as many begin."""
        width = self._blocks_per_row
        new = [
            NewRequest(
                slot,
                f"request-{slot}",
                np.array([slot], np.int32),
                1,
                0,
                np.arange(1 + slot * width, 1 + (slot + 1) * width, dtype=np.int32),
                SamplingParams(),
            )
            for slot in range(self._rows)
        ]
        finished = self._slots if self._computed else self._slots[:0]
        self._computed = 1
        zeros = np.zeros(self._rows, np.int32)
        return SchedulerOutput(self._step_id, self._slots, self._ones, zeros, new, finished_slots=finished)


def measure(name: str, once: Callable[[], object], seconds: float) -> None:
    """Print the median and the 99th percentile of `once`'s duration."""
    durations = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        once()
        durations.append(time.perf_counter() - start)
    p50, p99 = np.percentile(durations[len(durations) // 10 :], [50, 99]) * 1e6
    print(f"{name:42} {p50:9.1f} {p99:9.1f} {len(durations) / seconds:11.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    print(f"{'':42} {'p50 us':>9} {'p99 us':>9} {'per second':>11}")
    for ranks in args.ranks:
        config = ExecutorConfig(
            worker_cls="engine_core.bench.null_worker:NullWorker",
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
            max_num_seqs=args.rows,
            max_model_len=4096,
        )
        executor = MultiprocExecutor(config)
        started = time.perf_counter()
        executor.initialize()
        print(f"{ranks} ranks: start to ready {(time.perf_counter() - started) * 1e3:.0f} ms")
        steps = DecodeSteps(args.rows, 4096, config.block_size)
        try:
            measure("  collective_rpc, all ranks", executor.check_health, args.seconds)
            measure(
                f"  execute_model, {args.rows} rows",
                lambda steps=steps, executor=executor: executor.execute_model(steps.next()),  # type: ignore[misc]
                args.seconds,
            )
        finally:
            executor.shutdown()


if __name__ == "__main__":
    main()
