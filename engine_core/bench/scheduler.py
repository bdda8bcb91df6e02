"""What scheduling costs: CPU time of `schedule` and `update_from_output`, of admission, hashing and waiting.

`engine-core bench scheduler --peers PYTHON` measures vLLM's scheduler beside it on the same work, with an
interpreter that can import vLLM.

Prompts are what each engine decodes requests to: lists in vLLM, int32 arrays here. (Requests from vLLM's
front ends bring us lists, too; turning one into an array takes 10 to 14 ns for each token.)
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from engine_core.bench.peer import measure_vllm
from engine_core.config import EngineConfig
from engine_core.kv_cache.hashing import BlockHasher
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.scheduler import Scheduler
from executor.sampling_params import SamplingParams
from executor.step import Int32s, ModelRunnerOutput, SchedulerOutput

NUM_BLOCKS = 200_000
MAX_MODEL_LEN = 131_072
ENDLESS = 1 << 20  # output tokens

_cpu = time.process_time


class Case(NamedTuple):
    name: str
    what: str
    unit: str
    better: str  # "less" or "more"
    target: str  # as a bound on ours, or a factor against vLLM


CASES = (
    *(
        Case(f"decode_{n}", f"decode step, {n} running", "us CPU", "less", target)
        for n, target in ((1, "<= 80 us"), (32, "1/6"), (256, "1/25"), (1024, "1/40"))
    ),
    *(
        Case(f"decode_async_{n}", f"decode step, {n} running, async", "us CPU", "less", "")
        for n in (1, 32, 256, 1024)
    ),
    Case("admit_miss", "admission, 512-token prompts, cache misses", "req/s", "more", "4x"),
    Case("admit_hit", "admission, 512-token prompts, 496 cached", "req/s", "more", "4x"),
    Case("hash_100k", "hashing a 100,000-token prompt", "ms CPU", "less", "1/4"),
    Case("waiting_cycle_0", "decode step, 256 running, nobody waits", "us CPU", "less", ""),
    Case("waiting_cycle_10000", "decode step, 256 running, 10,000 wait", "us CPU", "less", "no growth"),
    Case("waiting_add_10000", "adding a request to 10,000", "us CPU", "less", "O(1)"),
    Case("waiting_abort_10000", "aborting one of 10,000 that wait", "us CPU", "less", "O(1)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each case; the median counts")
    parser.add_argument("--only", default="", help="cases to measure, by the start of their name")
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="also measure vLLM, in this interpreter (default: its own)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    wanted = [case for case in CASES if case.name.startswith(args.only)]
    if not wanted:
        print(
            f"no case starts with {args.only!r}; there are {', '.join(c.name for c in CASES)}",
            file=sys.stderr,
        )
        return 2
    ours = measure_all([case.name for case in wanted], args.repeats)
    theirs: dict[str, float] = {}
    if args.peers:
        names = [case.name for case in wanted]
        theirs = measure_vllm(args.peers, "vllm_scheduler.py", str(args.repeats), *names)
    if args.json:
        print(json.dumps({"engine-core": ours, **({"vllm": theirs} if args.peers else {})}, indent=2))
    else:
        for line in table(wanted, ours, theirs):
            print(line)
    return 0


def measure_all(names: list[str], repeats: int) -> dict[str, float]:
    """The median of `repeats` measurements of each case, in the case's unit."""
    found: dict[str, float] = {}
    for case in CASES:
        if case.name in names:
            found[case.name] = statistics.median(_measure(case.name) for _ in range(repeats))
    return found


def table(cases: list[Case], ours: dict[str, float], theirs: dict[str, float]) -> Iterator[str]:
    if theirs:
        yield "| | vLLM | engine-core | times | asked |"
        yield "|---|---|---|---|---|"
    else:
        yield "| | engine-core |"
        yield "|---|---|"
    for case in cases:
        mine = f"{_short(ours[case.name])} {case.unit}"
        if not theirs:
            yield f"| {case.what} | {mine} |"
            continue
        other = theirs[case.name]
        factor = other / ours[case.name] if case.better == "less" else ours[case.name] / other
        yield f"| {case.what} | {_short(other)} {case.unit} | {mine} | {factor:.1f} | {case.target} |"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# The work. `vllm_scheduler.py` does the same.


def _measure(name: str) -> float:
    gc.collect()
    kind, _, count = name.rpartition("_")
    measures: dict[str, Callable[[], float]] = {
        "decode": lambda: _decode(int(count), is_async=False),
        "decode_async": lambda: _decode(int(count), is_async=True),
        "admit": lambda: _admit(hits=count == "hit"),
        "hash": _hash_100k,
        "waiting_cycle": lambda: _waiting(int(count))[0],
        "waiting_add": lambda: _waiting(int(count))[1],
        "waiting_abort": lambda: _waiting(int(count))[2],
    }
    try:
        return measures[kind]()
    finally:
        gc.unfreeze()


def _tokens(count: int, seed: int) -> Int32s:
    """A prompt as a request from one of our clients has it. (count,)"""
    return np.array(random.Random(seed).choices(range(10, 32000), k=count), np.int32)


def _request(request_id: str, prompt: Int32s, max_tokens: int, hasher: BlockHasher | None) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        block_hasher=hasher,
    )


def _scheduler(is_async: bool, max_num_seqs: int = 1024) -> Scheduler:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, async_scheduling=is_async)
    return Scheduler(config, NUM_BLOCKS, MAX_MODEL_LEN)


def _answer(scheduler: Scheduler, step: SchedulerOutput) -> ModelRunnerOutput:
    """Token 7 for each row whose known tokens are all computed after the step, the last one planned."""
    rows = scheduler.batch.in_flight[-1].rows
    chunk = scheduler.batch.columns().chunk
    chunk = chunk[: len(step.slots)] if rows is None else chunk[rows]
    return ModelRunnerOutput(
        step.step_id, np.full((len(step.slots), 1), 7, np.int32), (chunk == 0).astype(np.int32)
    )


def _run_step(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    scheduler.update_from_output(step, _answer(scheduler, step))


def _start_decoding(scheduler: Scheduler, count: int) -> None:
    for i in range(count):
        scheduler.add_request(_request(str(i), _tokens(128, i), ENDLESS, scheduler.hasher))
    while scheduler.num_waiting or scheduler.batch.columns().chunk.any():
        _run_step(scheduler)


def _cycles(scheduler: Scheduler, steps: int, is_async: bool) -> float:
    """CPU microseconds for each plan and intake; with async one step is kept in flight."""
    previous = scheduler.schedule() if is_async else None
    previous_answer = _answer(scheduler, previous) if previous is not None else None
    total = 0.0
    for _ in range(steps):
        start = _cpu()
        step = scheduler.schedule()
        total += _cpu() - start
        output = _answer(scheduler, step)
        start = _cpu()
        if previous is None or previous_answer is None:
            scheduler.update_from_output(step, output)
        else:
            scheduler.update_from_output(previous, previous_answer)
        total += _cpu() - start
        if is_async:
            previous, previous_answer = step, output
    return total / steps * 1e6


def _decode(count: int, is_async: bool) -> float:
    scheduler = _scheduler(is_async)
    _start_decoding(scheduler, count)
    gc.collect()
    gc.freeze()
    return _cycles(scheduler, max(64, min(1500, 60000 // count)), is_async)


def _admit(hits: bool, count: int = 400, length: int = 512) -> float:
    """Requests per CPU second, from a decoded request to its only output token."""
    scheduler = _scheduler(is_async=False)
    shared = _tokens(length - 16, 1_000_000)
    prompts = [np.concatenate((shared, _tokens(16, i))) if hits else _tokens(length, i) for i in range(count)]
    if hits:
        scheduler.add_request(_request("warm", prompts[0], 1, scheduler.hasher))
        while scheduler.has_unfinished_requests():
            _run_step(scheduler)
    gc.collect()
    gc.freeze()
    start = _cpu()
    for i, prompt in enumerate(prompts):
        scheduler.add_request(_request(str(i), prompt, 1, scheduler.hasher))
    while scheduler.has_unfinished_requests():
        _run_step(scheduler)
    return count / (_cpu() - start)


def _hash_100k() -> float:
    """CPU milliseconds for a request with the prompt."""
    hasher, prompt = BlockHasher(16), _tokens(100_000, 1)
    start = _cpu()
    request = _request("r", prompt, 1, hasher)
    spent = _cpu() - start
    assert len(request.block_hashes) == 100_000 // 16
    return spent * 1e3


def _waiting(num_waiting: int, num_running: int = 256) -> tuple[float, float, float]:
    """CPU microseconds of a cycle, of adding one request, and of aborting one that waits."""
    scheduler = _scheduler(is_async=False, max_num_seqs=num_running)
    _start_decoding(scheduler, num_running)
    requests = [_request(f"w{i}", _tokens(128, 5000 + i), 64, scheduler.hasher) for i in range(num_waiting)]
    gc.collect()
    gc.freeze()
    start = _cpu()
    for request in requests:
        scheduler.add_request(request)
    add = (_cpu() - start) / max(1, num_waiting) * 1e6
    cycle = _cycles(scheduler, 200, is_async=False)
    aborted = requests[:: max(1, num_waiting // 100)]
    start = _cpu()
    for request in aborted:
        scheduler.finish_requests([request.request_id], FinishReason.ABORT)
    return cycle, add, (_cpu() - start) / max(1, len(aborted)) * 1e6
