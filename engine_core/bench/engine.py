"""What an engine process delivers to a client: tokens through the socket, their CPU cost, latency, start.

The workers compute nothing, so that all that is measured is the engine's. A closed loop keeps N requests of
128 prompt and 128 output tokens alive. `--peers PYTHON` measures vLLM's engine and its own client beside it,
with an interpreter that can import vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine_core.bench.peer import measure_vllm
from engine_core.client import EngineClient
from engine_core.config import EngineConfig
from executor.sampling_params import SamplingParams

PROMPT_TOKENS = OUTPUT_TOKENS = 128
NULL_WORKER = "engine_core.bench.null_worker:NullWorker"


class Case(NamedTuple):
    name: str
    what: str
    unit: str
    better: str  # "less" or "more"
    target: str  # as a bound on ours, or a factor against vLLM


CASES = (
    *(
        Case(f"{kind}_{n}", f"{what}, {n} concurrent", unit, better, target if n == 256 else "")
        for n in (1, 64, 256, 1024)
        for kind, what, unit, better, target in (
            ("tokens", "tokens through the socket", "token/s", "more", "12x"),
            ("cpu", "CPU of the engine for a token", "us", "less", "1/12"),
            ("client_cpu", "CPU of the client for a token", "us", "less", ""),
        )
    ),
    Case("tokens_2_ranks", "tokens through the socket, 2 ranks, 256 concurrent", "token/s", "more", "8x"),
    Case("cpu_2_ranks", "CPU of engine and ranks for a token, 256 concurrent", "us", "less", "1/12"),
    Case("first_token", "add to first token, back to back, median", "us", "less", "1/3"),
    Case("first_token_20ms", "add to first token, 20 ms apart, median", "us", "less", "1/3"),
    Case("start_2_ranks", "start to ready, 2 ranks", "s", "less", "<= 1 s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each case; the median counts"
    )
    parser.add_argument(
        "--no-async-scheduling", action="store_true", help="plan a step when the last is done"
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="also measure vLLM, in this interpreter (default: its own)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    wanted = [case for case in CASES if args.only in case.name]
    if not wanted:
        print(f"no case has {args.only!r} in its name: {', '.join(c.name for c in CASES)}", file=sys.stderr)
        return 2
    names = [case.name for case in wanted]
    is_async = not args.no_async_scheduling
    ours = measure_all(names, args.repeats, is_async)
    theirs: dict[str, float] = {}
    if args.peers:
        mode = "async" if is_async else "sync"
        theirs = measure_vllm(args.peers, "vllm_engine.py", str(args.repeats), mode, *names)
    if args.json:
        print(json.dumps({"engine-core": ours, **({"vllm": theirs} if args.peers else {})}, indent=2))
    else:
        for line in table(wanted, ours, theirs):
            print(line)
    return 0


def measure_all(names: list[str], repeats: int, is_async: bool) -> dict[str, float]:
    """Case to figure, the median of the repeats."""
    wanted = set(names)
    found: dict[str, list[float]] = {}

    def keep(figures: dict[str, float]) -> None:
        for name, value in figures.items():
            if name in wanted:
                found.setdefault(name, []).append(value)

    if wanted - {"tokens_2_ranks", "cpu_2_ranks", "start_2_ranks"}:
        with _engine(1, is_async) as (client, _):
            for _ in range(repeats):
                for n in (1, 64, 256, 1024):
                    if wanted & {f"tokens_{n}", f"cpu_{n}", f"client_cpu_{n}"}:
                        tokens, cpu, client_cpu = closed_loop(client, n, max(4 * n, 12))
                        keep({f"tokens_{n}": tokens, f"cpu_{n}": cpu, f"client_cpu_{n}": client_cpu})
                if "first_token" in wanted:
                    keep({"first_token": first_token_us(client, 500, gap_s=0.0)})
                if "first_token_20ms" in wanted:
                    keep({"first_token_20ms": first_token_us(client, 100, gap_s=0.02)})
    if wanted & {"tokens_2_ranks", "cpu_2_ranks", "start_2_ranks"}:
        for _ in range(repeats):
            with _engine(2, is_async) as (client, start_s):
                keep({"start_2_ranks": start_s})
                if wanted & {"tokens_2_ranks", "cpu_2_ranks"}:
                    closed_loop(client, 256, 256)
                    tokens, cpu, _ = closed_loop(client, 256, 1024)
                    keep({"tokens_2_ranks": tokens, "cpu_2_ranks": cpu})
    return {name: statistics.median(values) for name, values in found.items()}


def table(cases: list[Case], ours: dict[str, float], theirs: dict[str, float]) -> Iterator[str]:
    """In Markdown. The factor says how many times better ours is."""
    if theirs:
        yield "| | vLLM | engine-core | times | asked |"
        yield "|---|---|---|---|---|"
    else:
        yield "| | engine-core |"
        yield "|---|---|"
    for case in cases:
        mine = f"{_short(ours[case.name])} {case.unit}"
        if case.name not in theirs:
            yield (
                f"| {case.what} | {mine} |" if not theirs else f"| {case.what} | | {mine} | | {case.target} |"
            )
            continue
        other = theirs[case.name]
        factor = other / ours[case.name] if case.better == "less" else ours[case.name] / other
        yield f"| {case.what} | {_short(other)} {case.unit} | {mine} | {factor:.1f} | {case.target} |"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextlib.contextmanager
def _engine(ranks: int, is_async: bool) -> Iterator[tuple[EngineClient, float]]:
    """A client of a new engine, and the seconds until it was ready."""
    config = EngineConfig(
        worker_cls=NULL_WORKER,
        tensor_parallel_size=ranks,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        async_scheduling=is_async,
    )
    begin = time.perf_counter()
    with EngineClient.launch(config) as client:
        yield client, time.perf_counter() - begin


_seeds = itertools.count()


def _prompt() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Unlike any before, so that nothing is cached."""
    return np.array(random.Random(next(_seeds)).choices(range(10, 32000), k=PROMPT_TOKENS), np.int32)


def closed_loop(client: EngineClient, concurrent: int, total: int) -> tuple[float, float, float]:
    """Tokens a second, and CPU microseconds for a token: of the engine and its ranks, and of this process."""
    prompts = [_prompt() for _ in range(total)]
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    waiting = iter(prompts)
    processes = [client.engine_pid, *_children(client.engine_pid)]
    engine_s = sum(map(_cpu_s, processes))
    own_s, begin = time.process_time(), time.perf_counter()
    for prompt in itertools.islice(waiting, concurrent):
        client.add_request(prompt, params)
    tokens = 0
    while client.num_live:
        for output in client.outputs():
            tokens += len(output.new_token_ids)
            if output.finish_code is not None:
                following = next(waiting, None)
                if following is not None:
                    client.add_request(following, params)
    wall_s, own_s = time.perf_counter() - begin, time.process_time() - own_s
    engine_s = sum(map(_cpu_s, processes)) - engine_s
    if tokens != total * OUTPUT_TOKENS:
        raise RuntimeError(f"{tokens} tokens came instead of {total * OUTPUT_TOKENS}")
    return tokens / wall_s, engine_s / tokens * 1e6, own_s / tokens * 1e6


def first_token_us(client: EngineClient, count: int, gap_s: float) -> float:
    """Median of `count` single requests."""
    params = SamplingParams(max_tokens=1)
    samples = []
    for _ in range(count):
        prompt = _prompt()
        if gap_s:
            time.sleep(gap_s)
        begin = time.perf_counter()
        client.add_request(prompt, params)
        client.outputs()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


def _cpu_s(pid: int) -> float:
    """CPU time of a process's living threads, to the nanosecond."""
    total_ns = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        total_ns += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total_ns * 1e-9


def _children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
