"""vLLM's engine process on the work of `engine.py`: `PYTHON vllm_engine.py REPEATS async|sync CASE...`.

Runs by itself in an interpreter that can import vLLM 0.33, and prints one JSON object, case to figure. The
client is vLLM's own `SyncMPClient`; executor and worker compute nothing.
"""

# mypy: ignore-errors

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each rank wants a NUMA node
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
# So that children can import this module, whatever the caller's directory.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

PROMPT_TOKENS = OUTPUT_TOKENS = 128
NUM_BLOCKS = 200_000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 200_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ANSWERS = {
    "get_kv_cache_spec": lambda: {"model.layers.0": _spec()},
    "determine_available_memory": lambda: NUM_BLOCKS * 2 * 16 * 4 * 16 * 2,
    "get_supported_kv_cache_layouts": lambda: ["LBNHC"],
    "compile_or_warm_up_model": lambda: CompilationTimes(0.0, 0.0),
    "get_supported_tasks": lambda: ("generate",),
    "supports_draft_weight_updates": lambda: False,
}


def _spec():
    return FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)


class Sampler:
    """Token 7 for every request whose prompt is complete: the least that a runner does."""

    def __init__(self):
        self.left = {}

    def run(self, step):
        for request in step.scheduled_new_reqs:
            self.left[request.req_id] = len(request.prompt_token_ids) - request.num_computed_tokens
        ids = list(step.num_scheduled_tokens)
        tokens = [[7]] * len(ids)
        if self.left:
            for i, request_id in enumerate(ids):
                if request_id in self.left:
                    self.left[request_id] -= step.num_scheduled_tokens[request_id]
                    if self.left[request_id] > 0:
                        tokens[i] = []
                    else:
                        del self.left[request_id]
        index = {request_id: i for i, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)


class NullExecutor(Executor):
    """In the engine's process."""

    supports_pp = False

    def _init_executor(self):
        self.sampler = Sampler()
        self.output = None

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **_):
        answer = ANSWERS.get(method)
        answers = [answer() if answer else None]
        return _done(answers) if non_block else answers

    def execute_model(self, scheduler_output, non_block=False):
        self.output = self.sampler.run(scheduler_output)
        output = None if scheduler_output.total_num_scheduled_tokens else self.output
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output, non_block=False):
        return _done(self.output) if non_block else self.output

    def check_health(self):
        pass

    def shutdown(self):
        pass

    @classmethod
    def supports_async_scheduling(cls):
        return True


class NullWorker(WorkerBase):
    """The same as a rank of vLLM's MultiprocExecutor."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Sampler()
        self.output = None

    def init_device(self):
        pass

    def load_model(self, *, load_dummy_weights=False):
        pass

    def get_kv_cache_spec(self):
        return ANSWERS["get_kv_cache_spec"]()

    def get_supported_kv_cache_layouts(self):
        return ANSWERS["get_supported_kv_cache_layouts"]()

    def get_supported_tasks(self):
        return ANSWERS["get_supported_tasks"]()

    def determine_available_memory(self):
        return ANSWERS["determine_available_memory"]()

    def compile_or_warm_up_model(self):
        return ANSWERS["compile_or_warm_up_model"]()

    def initialize_from_config(self, kv_cache_config):
        pass

    def execute_model(self, scheduler_output):
        self.output = self.sampler.run(scheduler_output)
        return None if scheduler_output.total_num_scheduled_tokens else self.output

    def sample_tokens(self, grammar_output):
        return self.output

    def shutdown(self):
        pass


def _done(value):
    future = Future()
    future.set_result(value)
    return future


def make_client(directory, ranks, is_async):
    (Path(directory) / "config.json").write_text(json.dumps(MODEL))
    worker_cls = "vllm_engine.NullWorker" if ranks > 1 else "auto"
    config = VllmConfig(
        model_config=ModelConfig(
            model=directory,
            dtype="bfloat16",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=131072,
            enforce_eager=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len=131072,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=16, enable_prefix_caching=True, prefix_caching_hash_algo="sha256"
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else None,
            worker_cls=worker_cls,
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    # vLLM's CPU platform turns these off; what is measured is the control plane as a GPU has it.
    config.scheduler_config.async_scheduling = is_async
    config.scheduler_config.enable_chunked_prefill = True
    config.cache_config.enable_prefix_caching = True
    config.cache_config.block_size = 16
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.parallel_config.worker_cls = worker_cls
    begin = time.perf_counter()
    executor = MultiprocExecutor if ranks > 1 else NullExecutor
    client = EngineCoreClient.make_client(True, False, config, executor, log_stats=True)
    return client, time.perf_counter() - begin


_numbers = itertools.count()


def make_request(max_tokens):
    n = next(_numbers)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    params.update_from_generation_config({}, 2)
    return EngineCoreRequest(
        request_id=f"r{n}",
        prompt_token_ids=random.Random(n).choices(range(10, 32000), k=PROMPT_TOKENS),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def descendants(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def cpu_s(pid):
    total_ns = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        total_ns += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total_ns * 1e-9


def closed_loop(client, concurrent, total):
    waiting = iter([make_request(OUTPUT_TOKENS) for _ in range(total)])
    processes = descendants(os.getpid())
    engine_s = sum(map(cpu_s, processes))
    own_s, begin = time.process_time(), time.perf_counter()
    live = tokens = 0
    for request in itertools.islice(waiting, concurrent):
        client.add_request(request)
        live += 1
    while live:
        for output in client.get_output().outputs:
            tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                live -= 1
                request = next(waiting, None)
                if request is not None:
                    client.add_request(request)
                    live += 1
    wall_s, own_s = time.perf_counter() - begin, time.process_time() - own_s
    engine_s = sum(map(cpu_s, processes)) - engine_s
    assert tokens == total * OUTPUT_TOKENS, tokens
    return tokens / wall_s, engine_s / tokens * 1e6, own_s / tokens * 1e6


def first_token_us(client, count, gap_s):
    samples = []
    for _ in range(count):
        request = make_request(1)
        if gap_s:
            time.sleep(gap_s)
        begin = time.perf_counter()
        client.add_request(request)
        while not any(output.request_id == request.request_id for output in client.get_output().outputs):
            pass
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


def measure(wanted, repeats, is_async):
    found = {}

    def keep(**figures):
        for name, value in figures.items():
            if name in wanted:
                found.setdefault(name, []).append(value)

    two_ranks = {"tokens_2_ranks", "cpu_2_ranks", "start_2_ranks"}
    if wanted - two_ranks:
        with tempfile.TemporaryDirectory() as directory:
            client, _ = make_client(directory, 1, is_async)
            for _ in range(repeats):
                for n in (1, 64, 256, 1024):
                    if wanted & {f"tokens_{n}", f"cpu_{n}", f"client_cpu_{n}"}:
                        tokens, cpu, client_cpu = closed_loop(client, n, max(2 * n, 12))
                        keep(**{f"tokens_{n}": tokens, f"cpu_{n}": cpu, f"client_cpu_{n}": client_cpu})
                if "first_token" in wanted:
                    keep(first_token=first_token_us(client, 300, 0.0))
                if "first_token_20ms" in wanted:
                    keep(first_token_20ms=first_token_us(client, 60, 0.02))
            client.shutdown()
    if wanted & two_ranks:
        with tempfile.TemporaryDirectory() as directory:
            client, start_s = make_client(directory, 2, is_async)
            keep(start_2_ranks=start_s)
            for _ in range(repeats):
                if wanted & {"tokens_2_ranks", "cpu_2_ranks"}:
                    tokens, cpu, _ = closed_loop(client, 256, 512)
                    keep(tokens_2_ranks=tokens, cpu_2_ranks=cpu)
            client.shutdown()
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    figures = measure(set(sys.argv[3:]), int(sys.argv[1]), sys.argv[2] == "async")
    print(json.dumps(figures), flush=True)
