"""vLLM's scheduler on the work of `scheduler.py`: `PYTHON vllm_scheduler.py REPEATS CASE...`.

Runs by itself in an interpreter that can import vLLM 0.33, and prints one JSON object, case to figure.
"""

# mypy: ignore-errors

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

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
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
NUM_BLOCKS = 200_000
MAX_MODEL_LEN = 131_072
ENDLESS = 1 << 20

_cpu = time.process_time
_models = tempfile.TemporaryDirectory()

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


def make_hasher():
    digest = get_hash_fn_by_name("sha256")
    init_none_hash(digest)
    return get_request_block_hasher(BLOCK_SIZE, digest)


HASHER = make_hasher()


def make_scheduler(is_async, max_num_seqs=1024):
    """As on a GPU: what vLLM's CPU platform switches off is on."""
    (Path(_models.name) / "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(
            model=_models.name,
            dtype="bfloat16",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=True, prefix_caching_hash_algo="sha256"
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    config.scheduler_config.async_scheduling = is_async
    config.scheduler_config.enable_chunked_prefill = True
    config.cache_config.enable_prefix_caching = True
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def tokens(count, seed):
    return random.Random(seed).choices(range(10, 32000), k=count)


def make_request(request_id, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    params.update_from_generation_config({}, 2)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=HASHER,
    )


def answer(scheduler, step):
    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={id_: i for i, id_ in enumerate(ids)},
        sampled_token_ids=[[] if scheduler.requests[id_].is_prefill_chunk else [7] for id_ in ids],
    )


def run_step(scheduler):
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer(scheduler, step))


def start_decoding(scheduler, count):
    for i in range(count):
        scheduler.add_request(make_request(str(i), tokens(128, i), ENDLESS))
    while scheduler.waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        run_step(scheduler)


def cycles(scheduler, steps, is_async):
    previous = (step := scheduler.schedule(), answer(scheduler, step)) if is_async else None
    total = 0.0
    for _ in range(steps):
        start = _cpu()
        step = scheduler.schedule()
        total += _cpu() - start
        now = (step, answer(scheduler, step))
        start = _cpu()
        scheduler.update_from_output(*(previous if is_async else now))
        total += _cpu() - start
        previous = now
    return total / steps * 1e6


def decode(count, is_async):
    scheduler = make_scheduler(is_async)
    start_decoding(scheduler, count)
    gc.collect()
    gc.freeze()
    return cycles(scheduler, max(64, min(1500, 60000 // count)), is_async)


def admit(hits, count=400, length=512):
    scheduler = make_scheduler(False)
    shared = tokens(length - 16, 1_000_000)
    prompts = [shared + tokens(16, i) if hits else tokens(length, i) for i in range(count)]
    if hits:
        scheduler.add_request(make_request("warm", prompts[0], 1))
        while scheduler.has_unfinished_requests():
            run_step(scheduler)
    gc.collect()
    gc.freeze()
    start = _cpu()
    for i, prompt in enumerate(prompts):
        scheduler.add_request(make_request(str(i), prompt, 1))
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    return count / (_cpu() - start)


def hash_100k():
    prompt = tokens(100_000, 1)
    start = _cpu()
    make_request("r", prompt, 1)
    return (_cpu() - start) * 1e3


def waiting(num_waiting, num_running=256):
    scheduler = make_scheduler(False, num_running)
    start_decoding(scheduler, num_running)
    requests = [make_request(f"w{i}", tokens(128, 5000 + i), 64) for i in range(num_waiting)]
    gc.collect()
    gc.freeze()
    start = _cpu()
    for request in requests:
        scheduler.add_request(request)
    add = (_cpu() - start) / max(1, num_waiting) * 1e6
    cycle = cycles(scheduler, 200, False)
    aborted = requests[:: max(1, num_waiting // 100)]
    start = _cpu()
    for request in aborted:
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    return cycle, add, (_cpu() - start) / max(1, len(aborted)) * 1e6


def measure(name):
    gc.collect()
    kind, _, count = name.rpartition("_")
    figure = {
        "decode": lambda: decode(int(count), False),
        "decode_async": lambda: decode(int(count), True),
        "admit": lambda: admit(count == "hit"),
        "hash": hash_100k,
        "waiting_cycle": lambda: waiting(int(count))[0],
        "waiting_add": lambda: waiting(int(count))[1],
        "waiting_abort": lambda: waiting(int(count))[2],
    }[kind]()
    gc.unfreeze()
    return figure


def main():
    repeats, names = int(sys.argv[1]), sys.argv[2:]
    print(json.dumps({name: statistics.median(measure(name) for _ in range(repeats)) for name in names}))


if __name__ == "__main__":
    main()
