"""How long it takes to notice a death, to serve again or be told, and what is left.

Two ranks, mock workers. SIGKILL of a rank while a step hangs, with the other rank in the same step (busy) or
waiting for the next (idle); of a rank at work; of the engine. Run as `python -m benchmarks.failures`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine_core.chaos.leftovers import Mark
from engine_core.client import EngineClient
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError
from executor.sampling_params import SamplingParams
from transport.state_page import StatePage

CASES = ("worker 1, other busy", "worker 0, other busy", "worker 0, other idle", "worker at work", "engine")


def config() -> EngineConfig:
    return EngineConfig(
        worker_cls="executor.faulty_worker:FaultyWorker",
        worker_options={"mock_step_ms": 2.0},
        tensor_parallel_size=2,
        max_worker_restarts=100,
        log_stats=False,
    )


def measure(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = directory
        mark = Mark(Path(directory))
        begun = time.monotonic()
        with EngineClient.launch(config(), log_level="CRITICAL") as client:
            result: dict[str, Any] = {"case": case, "start_s": time.monotonic() - begun}
            for _ in range(32):
                client.add_request(list(range(100)), SamplingParams(max_tokens=100_000))
            read_tokens(client, 500)
            kill = kill_engine if case == "engine" else kill_rank
            result |= kill(client, mark, case)
        result["left"] = wait_for_nothing(mark)
        mark.remove()
        return result


def kill_rank(client: EngineClient, mark: Mark, case: str) -> dict[str, Any]:
    before = ranks(mark)
    victim = 0 if case.startswith("worker 0") else 1
    if case != "worker at work":
        hanging = None if case.endswith("busy") else victim
        client.collective_rpc("inject", args=[{"kind": "hang", "rank": hanging}])
        time.sleep(0.3)
    with StatePage.open(client.engine_pid) as page:
        at = time.monotonic()
        os.kill(before[victim], signal.SIGKILL)
        known_s = wait_until(lambda: page.snapshot()["engine"]["phase"] == "restarting workers", at)
        wait_until(lambda: page.snapshot()["engine"]["phase"] == "ready", at)
    client.outputs(timeout_s=0)  # what came before
    read_tokens(client, 1)
    return {
        "known_s": known_s,
        "served_again_s": time.monotonic() - at,
        "old_ranks_left": len(set(before.values()) & set(mark.processes())),
    }


def kill_engine(client: EngineClient, mark: Mark, case: str) -> dict[str, Any]:
    at = time.monotonic()
    os.kill(client.engine_pid, signal.SIGKILL)
    try:
        while True:
            client.outputs(timeout_s=10)
    except EngineDeadError as error:
        return {"told_s": time.monotonic() - at, "cause": error.cause}


def read_tokens(client: EngineClient, count: int) -> None:
    while count > 0:
        count -= sum(len(output.new_token_ids) for output in client.outputs(timeout_s=30))


def ranks(mark: Mark) -> dict[int, int]:
    found = {}
    for pid, command in mark.processes().items():
        words = command.split()
        if "executor.worker_proc" in words:
            found[int(words[words.index("executor.worker_proc") + 1])] = pid
    return found


def wait_until(condition: Callable[[], bool], since: float) -> float:
    while not condition():
        time.sleep(0.0005)
        assert time.monotonic() - since < 30
    return time.monotonic() - since


def wait_for_nothing(mark: Mark) -> list[str]:
    deadline = time.monotonic() + 5
    while (left := mark.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for case in CASES:
        results = [measure(case) for _ in range(args.repeats)]
        summary: dict[str, Any] = {"case": case}
        for name in ("start_s", "known_s", "served_again_s", "told_s"):
            values = [result[name] for result in results if name in result]
            if values:
                summary[name] = [round(f(values), 4) for f in (min, statistics.median, max)]
        summary["left"] = [line for result in results for line in result["left"]]
        summary["old_ranks_left"] = sum(result.get("old_ranks_left", 0) for result in results)
        if args.json:
            print(msgspec.json.encode(summary).decode(), flush=True)
        else:
            parts = [f"{k} {'/'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in summary.items()]
            print("; ".join(parts), flush=True)


if __name__ == "__main__":
    main()
