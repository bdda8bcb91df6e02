"""The worker: what the engine calls, in terms of the model, the sampler and the batch.

    engine-core serve --worker-cls engine_core_smollm2.worker:SmolLM2Worker [--model FILE.gguf]

Each `--worker-option name=value` is a field of `Options`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from executor.batch_state import BatchState
from executor.config import ExecutorConfig
from executor.sampling import Sampler
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.worker import ModelInfo, Worker

from .attention import plan_attention
from .gguf_file import open_model
from .linear import Threads, blas
from .model import Llama, Tokens

Float32s = npt.NDArray[np.float32]


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """`num_threads` of a rank: by default its share of the cores.

    `kv_cache_gib`: memory that the KV cache of all ranks may take, as far as it is free.
    """

    num_threads: int | None = None
    kv_cache_gib: float = 4.0


class SmolLM2Worker(Worker):
    """Runs a Llama-family GGUF file: `config.model` is its path, or empty for SmolLM2-135M-Instruct."""

    def __init__(self, config: ExecutorConfig, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self._options = msgspec.convert(config.worker_options, Options, strict=False)
        self._cache: list[Float32s] = []
        self._threads = Threads(1)

    def init_device(self) -> None:
        share = len(os.sched_getaffinity(0)) // self.world_size
        self._threads = Threads(self._options.num_threads or max(1, share))

    def load_model(self) -> ModelInfo:
        file = open_model(self.config.model)
        self._model = Llama(file, self.rank, self.world_size)
        config = self._model.config
        self._sampler = Sampler(config.vocab_size, self.config.max_num_seqs, self.config.seed)
        return ModelInfo(config.vocab_size, config.context_length, eos_token_id=config.eos_token_id)

    def kv_cache_capacity(self) -> int:
        config, block_size = self._model.config, self.config.block_size
        token_bytes = 2 * config.num_layers * self._model.num_kv_heads * config.head_dim * 4
        room = min(self._options.kv_cache_gib * 2**30, free_memory() / 2) / self.world_size
        longest = self.config.max_model_len or config.context_length
        useful = self.config.max_num_seqs * -(-longest // block_size) + 1
        return min(int(room) // (token_bytes * block_size), useful)

    def initialize_cache(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        config = self._model.config
        shape = (num_blocks, self.config.block_size, 2, self._model.num_kv_heads, config.head_dim)
        self._cache = [np.zeros(shape, np.float32) for _ in range(config.num_layers)]

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        if not len(step.slots):  # it only tells of requests that ended
            return self._sampler.sample(np.empty((0, self._model.config.vocab_size), np.float32), step, batch)
        # The library's own threads are of no use for products as small as a tile's.
        with blas().limit(limits=1, user_api="blas"):
            return self._run(step, batch)

    def _run(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        tokens = Tokens(
            batch.input_ids(step),
            batch.positions(step),
            batch.slot_mapping(step),
            plan_attention(step, batch),
        )
        all_reduce = None if self.collective is None else self.collective.all_reduce
        hidden = self._model.forward(tokens, self._cache, self._threads, all_reduce)
        last = batch.query_start_loc(step)[1:] - 1
        output = self._sampler.sample(self._logits(hidden[last[batch.samples(step)]]), step, batch)
        for span in self._sampler.prompt_spans(step, batch):
            logprobs = self._sampler.prompt_logprobs(span, lambda tokens: self._logits(hidden[tokens]))
            output.prompt_logprobs.append(logprobs)
        return output

    def _logits(self, hidden: Float32s) -> Float32s:
        """(n, hidden_size) -> (n, vocab_size)"""
        logits = self._model.logits(hidden, self._threads)
        return logits if self.collective is None else self.collective.all_gather(logits)

    def sleep(self, level: int = 1) -> None:
        """The weights are in the host's memory anyway: level 1 leaves them there."""
        self.release_kv_cache()
        if level > 1:
            self._model.unload()

    def release_kv_cache(self) -> None:
        self._cache = []

    def wake_up(self, tags: list[str] | None = None) -> None:
        if (tags is None or "weights" in tags) and not self._model.layers:
            self._model.load()
        if (tags is None or "kv_cache" in tags) and not self._cache:
            self.initialize_cache(self._num_blocks)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """`path`: a file of the same shape. `tensors`: whole ones, by the file's names. `scale`: factors by
        name.

        Raises ValueError, with nothing changed, for what does not fit.
        """
        unknown = update_info.keys() - {"path", "tensors", "scale"}
        if unknown:
            raise ValueError(f"an update takes path, tensors and scale, not {', '.join(sorted(unknown))}")
        model = self._model
        if "path" in update_info:
            model = Llama(open_model(update_info["path"]), self.rank, self.world_size)
            if model.config != self._model.config:
                raise ValueError(f"{update_info['path']} holds a model of another shape")
        replaced = dict(update_info.get("tensors", {}))
        for name, factor in update_info.get("scale", {}).items():
            if name not in model.weights:
                raise ValueError(f"there is no tensor {name}")
            replaced[name] = model.weights.tensor(name) * np.float32(factor)
        model.replace(replaced)
        self._model = model

    def shutdown(self) -> None:
        self._threads.close()


def free_memory() -> int:
    """Bytes that this process can take, by the machine and by its control group."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = (
        int(available[1]) * 1024 if available else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free
