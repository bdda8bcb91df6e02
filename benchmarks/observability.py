"""What it costs to be observed: a decode step with state page, metrics and KV events, and without.

python -m benchmarks.observability [--rows 256] [--ranks 2] [--rounds 40] [--steps 250]
                                   [--worker-cls engine_core.bench.null_worker:NullWorker]

Engines run side by side, each with worker processes of its own: by default the mock's, which keep a KV cache.
They take turns, so that whatever else the machine does falls on all, and their outputs are encoded as for a
client. A step's own time is without the wait for the workers. The ranks write their rows of the page in all
of them, because the executor goes by them; what a row costs is measured alone.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.dispatch import Dispatcher
from engine_core.kv_events import KVEventRecorder, KVEventsConfig
from engine_core.kv_publisher import ZmqEventPublisher
from engine_core.request import Request
from executor.base import make_executor
from executor.futures import StepFuture
from executor.sampling_params import SamplingParams
from executor.step import ModelRunnerOutput
from transport.heartbeat import Heartbeat
from transport.state_page import StatePage

PROMPT = 64
LEVELS = ("off", "page and metrics", "and KV events")


class Waits:
    """How long `StepFuture.result` has taken."""

    total_s = 0.0


def measure_waits() -> None:
    result = StepFuture.result

    def measured(self: StepFuture, timeout: float | None = None) -> ModelRunnerOutput:
        begun = time.perf_counter()
        try:
            return result(self, timeout)
        finally:
            Waits.total_s += time.perf_counter() - begun

    StepFuture.result = measured  # type: ignore[method-assign]


@dataclass
class Engine:
    core: EngineCore
    dispatcher: Dispatcher
    step_us: list[float] = field(default_factory=list)
    own_us: list[float] = field(default_factory=list)

    def admit(self, rows: int) -> None:
        rng = np.random.default_rng(1)
        for row in range(rows):
            # Of different lengths, so that in each step some fill a block.
            prompt = rng.integers(0, 1000, rng.integers(PROMPT // 2, PROMPT)).astype(np.int32)
            params = SamplingParams(max_tokens=1 << 20)
            request = Request(f"request-{row}", prompt, params, block_hasher=self.core.scheduler.hasher)
            self.core.add_request(request)
            request.wire_prefix = b"\x92\xa9" + request.request_id.encode() + b"\x91"
        while self.core.scheduler.num_waiting:
            self.dispatcher.step()
            self.dispatcher.outbox.clear()

    def run(self, steps: int) -> None:
        step, outbox, report = self.dispatcher.step, self.dispatcher.outbox, self.core.report
        for _ in range(steps):
            begun, waited_s = time.perf_counter(), Waits.total_s
            step()
            outbox.clear()
            if report is not None:
                report.delivered()
            took_s = time.perf_counter() - begun
            self.step_us.append(took_s * 1e6)
            self.own_us.append((took_s - (Waits.total_s - waited_s)) * 1e6)


def make(stack: ExitStack, ranks: int, rows: int, worker_cls: str, level: str) -> Engine:
    config = EngineConfig(
        worker_cls=worker_cls,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        num_gpu_blocks_override=600_000,
        max_model_len=32_768,
        max_num_seqs=rows,
        max_num_batched_tokens=max(2048, rows * PROMPT),
    )
    page = stack.enter_context(StatePage.create(ranks))
    executor = make_executor(config.executor_config(), page)
    stack.callback(executor.shutdown)
    if level == LEVELS[0]:
        core = EngineCore(config, executor)
        return Engine(core, Dispatcher(core))
    page.engine.claim()
    heartbeat = Heartbeat(page.engine)
    heartbeat.start()
    stack.callback(heartbeat.stop)
    recorder = None
    if level == LEVELS[2]:
        events = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*")
        publisher = ZmqEventPublisher(events, config.block_size)
        stack.callback(publisher.close)
        recorder = KVEventRecorder(publisher)
    core = EngineCore(config, executor, row=page.engine, kv_events=recorder, collect_metrics=True)
    return Engine(core, Dispatcher(core))


def cost_us(call: object, times: int = 20_000) -> float:
    """The least mean of a few, which interruptions lengthen."""
    import timeit

    return min(timeit.repeat(call, number=times // 10, repeat=10)) / (times // 10) * 1e6  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker-cls", default="executor.mock_worker:MockWorker")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=250, help="of each engine in a round")
    args = parser.parse_args()
    measure_waits()
    with ExitStack() as stack:
        engines = [make(stack, args.ranks, args.rows, args.worker_cls, level) for level in LEVELS]
        for engine in engines:
            engine.admit(args.rows)
            engine.run(args.steps)
        rounds = []
        for number in range(args.rounds):
            for engine in engines if number % 2 else engines[::-1]:
                engine.run(args.steps)
            rounds.append(
                [
                    [np.median(times[-args.steps :]) for times in (engine.step_us, engine.own_us)]
                    for engine in engines
                ]
            )
        medians = np.array(rounds)  # round, engine, step or own
        print(f"decode step of {args.rows} requests, {args.ranks} ranks, medians of {args.rounds} rounds, us")
        print(f"{'':20}{'step':>8}{'own':>8}{'own, more than off':>22}")
        for index, level in enumerate(LEVELS):
            step, own = np.median(medians[:, index], axis=0)
            low, middle, high = np.percentile(medians[:, index, 1] - medians[:, 0, 1], [25, 50, 75])
            print(f"{level:20}{step:8.1f}{own:8.1f}{middle:10.1f} ({low:.1f} to {high:.1f})")

        core = engines[2].core
        report, metrics = core.report, core.metrics
        assert report is not None and metrics is not None and core.row is not None
        slots = core.scheduler.batch.columns().slot.copy()
        now = time.monotonic()
        print("alone:")
        print(f"  engine's row of the page {cost_us(lambda: report._write(core.row, now)):8.2f} us")
        print(f"  tokens of a new batch    {cost_us(lambda: metrics.tokens(slots, now)):8.2f} us")
        print(f"  of the same one          {cost_us(lambda: metrics.tokens_again(now)):8.2f} us")
        step_us = cost_us(lambda: metrics.step(256, 1.0, 1.1, 1.2, 1.3, 1.4))
        print(f"  step and its stages      {step_us:8.2f} us")
        row = stack.enter_context(StatePage.create(1)).rank(0)
        both = cost_us(lambda: (row.begin_step(1, 2, now), row.end(now)))
        print(f"  rank's row, both writes  {both:8.2f} us")


if __name__ == "__main__":
    main()
