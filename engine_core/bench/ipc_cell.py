"""One measurement of `bench ipc`, in a process of its own: `python -m engine_core.bench.ipc_cell JSON`.

The writer stays on core 0 and reader i on core i + 1 (modulo the cores): where the kernel puts two
processes that talk to each other changes every figure by a factor of 4 to 10. The time is from before
encoding until the last reader has taken the message in. Readers acknowledge through shared memory; the next
message waits for that.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from engine_core.bench.ipc_transports import TRANSPORTS, Payload, Receive, Send, Transport
from executor.config import ExecutorConfig
from executor.multiproc import MultiprocExecutor
from executor.sampling_params import SamplingParams
from executor.step import NewRequest, SchedulerOutput
from transport import MessageQueue
from transport.processes import die_with_parent

_NOW = time.perf_counter_ns
_STAMP = 0  # words of the shared page: the writer's stamp; then a line for each reader
_COUNT, _TOOK, _CPU = 0, 1, 2  # messages, ns of the last one, ns of CPU time
_PATIENCE_S = 30.0
_CORES = sorted(os.sched_getaffinity(0))


class Cell(msgspec.Struct, kw_only=True):
    """What to measure."""

    kind: str  # latency, rate, attach, executor
    transport: str = "engine-core"
    n_readers: int = 1
    size: int = 0
    step: str = ""
    gap_s: float = 0.0  # pause before each message: at 0, the reader is still looking
    samples: int = 2000
    method: str = ""


class Readers:
    """Forked reader processes and the page they acknowledge in."""

    def __init__(self, transport: Transport, n: int, *, paced: bool) -> None:
        self._paced = paced
        # The writer must not keep readers on its own core from running.
        self._looks = 30 if n < len(_CORES) else 0
        self._page = memoryview(mmap.mmap(-1, 4096 * (1 + n // 30))).cast("Q")
        self._lines = [16 * (i + 1) for i in range(n)]
        self._pids = [self._fork(transport, i) for i in range(n)]

    def _fork(self, transport: Transport, index: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(parent)
            _pin(index + 1)
            self._serve(transport.reader(index), self._lines[index])
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _serve(self, receive: Receive, line: int) -> None:
        page, count = self._page, 0

        def taken() -> None:
            page[line + _TOOK] = _NOW() - page[_STAMP]

        while True:
            receive(taken)
            count += 1
            if self._paced:
                page[line + _CPU] = time.process_time_ns()
            page[line + _COUNT] = count

    def stamp(self) -> None:
        self._page[_STAMP] = _NOW()

    def await_count(self, count: int) -> None:
        page = self._page
        deadline = time.monotonic() + _PATIENCE_S
        for line in self._lines:
            looks = 0
            while page[line] < count:
                looks += 1
                if looks > self._looks:
                    os.sched_yield()
                    if not looks & 1023 and time.monotonic() > deadline:
                        raise TimeoutError(f"a reader has {page[line]} of {count} messages")

    def slowest_ns(self) -> int:
        return max(self._page[line + _TOOK] for line in self._lines)

    def cpu_ns(self) -> int:
        return max(self._page[line + _CPU] for line in self._lines)

    def end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(cell: Cell) -> dict[str, float]:
    """The measured figures; times in us."""
    if cell.kind == "attach":
        return _attach(cell.n_readers)
    if cell.kind == "executor":
        return _executor(cell)
    transport = TRANSPORTS[cell.transport](cell.n_readers, Payload(cell.size, cell.step))
    readers = Readers(transport, cell.n_readers, paced=cell.gap_s > 0)
    try:
        _pin(0)
        send = transport.writer()
        return _rate(send, readers, cell) if cell.kind == "rate" else _latency(send, readers, cell)
    finally:
        readers.end()
        transport.close()


def _latency(send: Send, readers: Readers, cell: Cell) -> dict[str, float]:
    took: list[int] = []
    started = cpu = 0
    warm_up = 50 if cell.gap_s < 0.01 else 2
    for number in range(warm_up + cell.samples):
        if number == warm_up:
            started, cpu = _NOW(), readers.cpu_ns()
        if cell.gap_s:
            time.sleep(cell.gap_s)
        readers.stamp()
        send()
        readers.await_count(number + 1)
        if number >= warm_up:
            took.append(readers.slowest_ns())
    wall = _NOW() - started
    if not cell.gap_s:
        return _summary(took)
    return _summary(took) | {"reader_cpu_percent": 100 * (readers.cpu_ns() - cpu) / wall}


def _rate(send: Send, readers: Readers, cell: Cell) -> dict[str, float]:
    sent, best = 0, 0.0
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(cell.samples):
            send()
        sent += cell.samples
        readers.await_count(sent)
        best = max(best, cell.samples / (time.perf_counter() - started))
    return {"per_s": best}


def _attach(n_readers: int) -> dict[str, float]:
    """Create a queue and attach its readers: the writer's part and, one after the other, theirs."""
    took = []
    for _ in range(20):
        started = _NOW()
        queue = MessageQueue.create(n_local=n_readers)
        handle = queue.handle()
        readers = [MessageQueue.attach(handle, rank, timeout_s=10) for rank in range(n_readers)]
        queue.wait_until_ready(10)
        took.append(_NOW() - started)
        for end in (queue, *readers):
            end.close()
    return _summary(took)


def _executor(cell: Cell) -> dict[str, float]:
    """A round trip through `MultiprocExecutor` with two ranks that do nothing."""
    warm_up = 50
    steps = _decode_steps(256, 1 + warm_up + cell.samples)
    config = ExecutorConfig(
        worker_cls="engine_core.bench.null_worker:NullWorker", tensor_parallel_size=2, max_num_seqs=256
    )
    executor = MultiprocExecutor(config)
    executor.initialize()
    try:
        executor.execute_model(next(steps))  # the prompts
        took = []
        for number in range(warm_up + cell.samples):
            step = next(steps)
            started = _NOW()
            if cell.method == "execute_model":
                executor.execute_model(step)
            else:
                executor.collective_rpc(cell.method)
            if number >= warm_up:
                took.append(_NOW() - started)
        return _summary(took)
    finally:
        executor.shutdown()


def _decode_steps(rows: int, count: int) -> Iterator[SchedulerOutput]:
    """256 prompts of 16 tokens in one step, then decode steps, in each of which a sixteenth of the rows get
    a block.
    """
    slots = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    prompt = np.arange(16, dtype=np.int32)
    blocks = np.arange(1, 2 * rows + 1, dtype=np.int32).reshape(rows, 2)  # ids do not matter to this worker
    yield SchedulerOutput(
        step_id=0,
        slots=slots,
        num_scheduled_tokens=16 * ones,
        num_computed_tokens=0 * ones,
        new_requests=[
            NewRequest(slot, f"request-{slot}", prompt, 16, 0, blocks[slot], SamplingParams())
            for slot in range(rows)
        ],
    )
    for number in range(1, count):
        gaining = slots[number % 16 :: 16]
        yield SchedulerOutput(
            step_id=number,
            slots=slots,
            num_scheduled_tokens=ones,
            num_computed_tokens=(15 + number) * ones,
            new_block_slots=gaining,
            new_block_ids=blocks[gaining, 0],
        )


def _summary(took_ns: list[int]) -> dict[str, float]:
    took_ns.sort()
    return {
        "p50_us": statistics.median(took_ns) / 1e3,
        "min_us": took_ns[0] / 1e3,
        "p99_us": took_ns[int(len(took_ns) * 0.99)] / 1e3,
    }


def _pin(core: int) -> None:
    os.sched_setaffinity(0, {_CORES[core % len(_CORES)]})


def main() -> None:
    result: dict[str, Any]
    try:
        result = run(msgspec.json.decode(sys.argv[1], type=Cell))
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
