"""SmolLM2 on this machine: tokens a second, and what would be possible.

    python -m benchmarks.smollm2 [--ranks 1 3] [--batches 1 8 32] [--context 128] [--seconds 4] [--llama-cpp]

Decoding is compared with two bounds taken in the same run: numpy's own products of the same shapes (with as
many threads as it likes), and reading the weights once a step at the bandwidth that a plain sum over memory
reaches. The engine's share is the part of a step in which no worker runs. `--llama-cpp` runs the same file
with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from engine_core_smollm2.gguf_file import LlamaConfig, open_model
from engine_core_smollm2.worker import SmolLM2Worker

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.request import Request
from executor.base import make_executor
from executor.batch_state import BatchState
from executor.sampling_params import SamplingParams
from executor.step import ModelRunnerOutput, SchedulerOutput

WINDOW_S = 0.5  # other work on the machine spares some of them


class TimedWorker(SmolLM2Worker):
    """Knows how long it has worked."""

    busy_s = 0.0

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        start = time.perf_counter()
        output = super().execute_model(step, batch)
        self.busy_s += time.perf_counter() - start
        return output

    def take_busy_s(self) -> float:
        busy, self.busy_s = self.busy_s, 0.0
        return busy


def best_of(call: Callable[[], object], times: int = 5) -> float:
    """Seconds of the quickest call."""
    call()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def bounds(config: LlamaConfig, batches: list[int]) -> tuple[dict[int, float], float]:
    """Seconds of a step: numpy's products of the model's shapes by batch size, and reading the weights."""
    rng = np.random.default_rng(0)
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    heads = config.num_heads * config.head_dim
    shapes = [
        (qkv, config.hidden_size),
        (config.hidden_size, heads),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    weights = [rng.random(shape, np.float32) for _ in range(config.num_layers) for shape in shapes]
    weights.append(rng.random((config.vocab_size, config.hidden_size), np.float32))

    def products(n: int) -> Callable[[], None]:
        inputs = {k: np.ones((n, k), np.float32) for k in {weight.shape[1] for weight in weights}}

        def run() -> None:
            for weight in weights:
                inputs[weight.shape[1]] @ weight.T

        return run

    def read() -> None:
        for weight in weights:
            flat = weight.reshape(-1)
            np.dot(flat, flat)

    return {n: best_of(products(n)) for n in batches}, best_of(read)


def decode(core: EngineCore, batch: int, context: int, seconds: float) -> tuple[float, float]:
    """Tokens a second of `batch` requests that decode, and the share of that time in which the worker
    idled."""
    rng = np.random.default_rng(0)
    for i in range(batch):
        prompt = rng.integers(100, 40000, context).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=4096)
        core.add_request(Request(f"r{i}", prompt, params))
    while core.scheduler.num_waiting or any(not len(c.token_ids) for c in core.step_fn().values()):
        core.step_fn()
    for _ in range(3):
        core.step_fn()
    core.executor.collective_rpc("take_busy_s")  # answered when the steps in flight are done
    begin = start = time.perf_counter()
    best, tokens = 0.0, 0
    while time.perf_counter() - begin < seconds:
        tokens += sum(len(client.token_ids) for client in core.step_fn().values())
        if (elapsed := time.perf_counter() - start) > WINDOW_S:
            best = max(best, tokens / elapsed)
            start, tokens = time.perf_counter(), 0
    busy = max(core.executor.collective_rpc("take_busy_s"))
    idle = 1 - busy / (time.perf_counter() - begin)
    core.abort_requests([f"r{i}" for i in range(batch)])
    while core.has_work:
        core.step_fn()
    return best, idle


def prefill(core: EngineCore, tokens: int) -> float:
    """Tokens a second of one long prompt."""
    rng = np.random.default_rng(1)
    found = []
    for i in range(2):
        prompt = rng.integers(100, 40000, tokens).astype(np.int32)
        core.add_request(Request(f"p{i}", prompt, SamplingParams(temperature=0, max_tokens=1)))
        start = time.perf_counter()
        while core.has_work:
            core.step_fn()
        found.append(tokens / (time.perf_counter() - start))
    return max(found)


def llama_cpp(path: str, batches: list[int], context: int, steps: int = 24) -> None:
    """The same with llama.cpp on as many threads as there are cores, quantised weights as they are."""
    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda *_: None)  # kept for as long as it may be called
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    widest = max(batches)
    params.n_ctx = max(widest * (context + steps + 16), 1024)
    params.kv_unified = True
    params.n_seq_max = widest
    params.n_batch = params.n_ubatch = max(2048, context)
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    ctx = lib.llama_init_from_model(model, params)
    rng = np.random.default_rng(0)

    def run(rows: list[tuple[int, int, int]]) -> float:
        """(token, position, sequence) each; seconds."""
        batch = lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i == len(rows) - 1 or len(rows) <= widest
        start = time.perf_counter()
        if lib.llama_decode(ctx, batch) != 0:
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(ctx)
        elapsed = time.perf_counter() - start
        lib.llama_batch_free(batch)
        return elapsed

    memory = lib.llama_get_memory(ctx)
    for n in batches:
        lib.llama_memory_clear(memory, True)
        for sequence in range(n):
            run([(int(rng.integers(100, 40000)), position, sequence) for position in range(context)])
        times = [run([(500, context + step, sequence) for sequence in range(n)]) for step in range(steps)]
        print(f"  decode, batch {n:3}: {n / float(np.median(times)):8.1f} tokens/s")
    lib.llama_memory_clear(memory, True)
    seconds = min(_prefill_llama(lib, memory, run, rng) for _ in range(2))
    print(f"  prefill of 512 tokens: {512 / seconds:8.1f} tokens/s")


def _prefill_llama(lib: object, memory: object, run: Callable[..., float], rng: np.random.Generator) -> float:
    lib.llama_memory_clear(memory, True)  # type: ignore[attr-defined]
    return run([(int(rng.integers(100, 40000)), position, 0) for position in range(512)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each decode cell")
    parser.add_argument("--model", default="", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--llama-cpp", action="store_true")
    args = parser.parse_args()
    file = open_model(args.model)
    config = LlamaConfig.from_gguf(file)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; contexts from {args.context} tokens on")
    products, read = bounds(config, args.batches)
    print(f"weights read once: {read * 1e3:.1f} ms a step")
    for n in args.batches:
        ms, rate = products[n] * 1e3, n / products[n]
        print(f"numpy's products, batch {n:3}: {ms:6.1f} ms a step = {rate:8.1f} tokens/s")
    for ranks in args.ranks:
        full = EngineConfig(
            worker_cls="benchmarks.smollm2:TimedWorker",
            model=args.model,
            tensor_parallel_size=ranks,
            max_num_seqs=max(args.batches),
            num_gpu_blocks_override=max(args.batches) * 128 + 256,
            enable_prefix_caching=False,
        )
        executor = make_executor(full.executor_config())
        core = EngineCore(full, executor)
        print(f"{ranks} rank{'s' if ranks > 1 else ''}")
        try:
            for n in args.batches:
                rate, idle = decode(core, n, args.context, args.seconds)
                print(
                    f"  decode, batch {n:3}: {rate:8.1f} tokens/s, {rate * products[n] / n:5.2f} of numpy's "
                    f"products, {rate * read / n:5.2f} of the memory bound; engine's share {idle:.1%}"
                )
            for tokens in (128, 1024):
                print(f"  prefill of {tokens} tokens: {prefill(core, tokens):8.1f} tokens/s")
        finally:
            core.shutdown()
    if args.llama_cpp:
        print("llama.cpp")
        llama_cpp(str(file.path), args.batches, args.context)


if __name__ == "__main__":
    main()
