"""How long ranks take to sum or gather an array through shared memory.

    python -m benchmarks.collective [--ranks 2 3] [--seconds 0.5]

For each number of ranks and array size: median and best time of a call on rank 0, in microseconds, with the
ranks arriving together, and what copying the array once costs. With more ranks than cores the time is the
scheduler's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transport.collective import Collective, CollectiveSegment

ROOT = Path(__file__).resolve().parents[1]
SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]  # bytes


def measure(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median and minimum of the time of a call, in microseconds."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 20:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), min(times)


def run_rank(rank: int, seconds: float, fds: list[int]) -> None:
    end = Collective(fds, rank, timeout_s=60)
    results = []
    for nbytes in SIZES:
        array = np.zeros(nbytes // 4, np.float32)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda array=array: end.all_reduce(array),
            "all_gather": lambda array=array: end.all_gather(array),
        }
        row: dict[str, object] = {"bytes": nbytes, "copy": measure(lambda array=array: array.copy(), 0.05)}
        for name, call in calls.items():
            # Rank 0 decides how often: the others follow its flag, which travels the same way.
            times = []
            go = np.zeros(1)
            stop_at = time.perf_counter() + seconds
            while True:
                go[0] = rank == 0 and time.perf_counter() < stop_at
                end.all_reduce(go)
                if not go[0]:
                    break
                for _ in range(20):
                    start = time.perf_counter()
                    call()
                    times.append((time.perf_counter() - start) * 1e6)
            row[name] = (statistics.median(times), min(times))
        results.append(row)
    if rank == 0:
        print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each cell")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, *fds = map(int, args.rank)
        run_rank(rank, args.seconds, fds)
        return
    print(f"{os.cpu_count()} cores; median (best), microseconds")
    for world_size in args.ranks:
        segment = CollectiveSegment(world_size)
        command = [sys.executable, __file__, "--seconds", str(args.seconds), "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *map(str, segment.fds)],
                pass_fds=segment.fds,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for rank in range(world_size)
        ]
        segment.close()
        output, _ = ranks[0].communicate()
        for process in ranks[1:]:
            process.communicate()
        print(f"\n{world_size} ranks\n{'array':>10} {'copy':>16} {'all_reduce':>20} {'all_gather':>20}")
        for row in json.loads(output):
            cells = [
                f"{median:,.1f} ({best:,.1f})"
                for median, best in (row[k] for k in ("copy", "all_reduce", "all_gather"))
            ]
            print(f"{row['bytes'] >> 10:>6} KiB {cells[0]:>16} {cells[1]:>20} {cells[2]:>20}")


if __name__ == "__main__":
    main()
