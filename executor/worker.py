"""The contract between the engine and whoever runs the model.

Subclass `Worker`, implement the five methods without a body here, and name the class with `--worker-cls
package.module:Class`. One instance runs per rank. The engine calls, in this order and always from the same
thread: the constructor, `init_device`, `load_model`, `kv_cache_capacity`, `initialize_cache`, then
`execute_model` once per step, and at the end `shutdown`. Any method may also be called by name through
`collective_rpc`. An exception from `execute_model` ends the rank group; from another method, only that call.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from executor.config import ExecutorConfig
from executor.imports import import_object
from executor.step import LoRARequest, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    import cProfile

    from executor.batch_state import BatchState
    from transport.collective import Collective


class ModelInfo(msgspec.Struct, frozen=True):
    """What the engine must know of the model. Every rank must give the same."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and output that one request may hold
    dtype: str = "float32"
    eos_token_id: int | None = None


class Worker:
    """One rank of the model runner."""

    def __init__(self, config: ExecutorConfig, rank: int, world_size: int) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.collective: Collective | None = None  # with several ranks there is one from `init_device` on
        self._profile: cProfile.Profile | None = None
        self._profile_file = ""

    def init_device(self) -> None:
        """Claim the device and join the other ranks."""
        raise NotImplementedError

    def load_model(self) -> ModelInfo:
        """Load this rank's share of the weights."""
        raise NotImplementedError

    def kv_cache_capacity(self) -> int:
        """Blocks of `config.block_size` tokens that fit this rank's memory. The engine takes
        the least of all ranks. Not asked for if `config.num_gpu_blocks` is set.
        """
        raise NotImplementedError

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache; block ids are below `num_blocks`, and block 0 is never given to a
        request."""
        raise NotImplementedError

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        """Run one step. `batch` has already applied `step`, and records the sampled tokens afterwards.

        Every rank returns the same tokens; rank 0's are used. `step`'s arrays may be kept.
        """
        raise NotImplementedError

    # Optional.

    def check_health(self) -> None:
        """Raise if this rank cannot work."""

    def shutdown(self) -> None:
        """Release what the process's end does not."""

    def profile(self, is_start: bool = True, prefix: str | None = None) -> str | None:
        """Start or stop a profiler. Returns the file that holds the profile, when it stops.

        This one is Python's cProfile, of the thread that serves calls; the file is `<prefix>rank<n>.prof`,
        for `python -m pstats`.
        """
        if is_start:
            if self._profile is not None:
                raise RuntimeError("the profiler runs already")
            import cProfile

            self._profile_file = os.path.abspath(f"{prefix or 'engine-core-'}rank{self.rank}.prof")
            open(self._profile_file, "wb").close()  # what cannot be written is not begun
            self._profile = cProfile.Profile()
            self._profile.enable()
            return None
        if self._profile is None:
            raise RuntimeError("the profiler does not run")
        profile, self._profile = self._profile, None
        profile.disable()
        profile.dump_stats(self._profile_file)
        return self._profile_file

    def set_log_level(self, level: str, logger: str | None = None) -> None:
        """Of all loggers in this process, or of one."""
        logging.getLogger(logger).setLevel(level.upper())

    def barrier(self, name: str) -> str:
        """Called on every rank; that it returns tells that the rank has done what came before."""
        return name

    def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 keeps the weights elsewhere, level 2 drops them. The KV cache is lost."""
        raise NotImplementedError(f"{type(self).__name__} cannot sleep")

    def release_kv_cache(self) -> None:
        """Give the memory of the KV cache back, until `wake_up` with `kv_cache`."""
        raise NotImplementedError(f"{type(self).__name__} cannot release its KV cache")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take back what `sleep` or `release_kv_cache` gave away; `tags` of `weights`, `kv_cache`; None for
        both. After level 2 the weights are loaded again. What is awake already is left as it is.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot sleep")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Change weights in place. The engine is idle, and drops what was computed with the old ones.

        `update_info` holds what the caller gave: `path`, `tensors` (arrays by name; whole ones, of which a
        rank takes its share), and options of the worker's own. One without arrays is called again when the
        ranks are replaced, in the same order as before.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot update weights")

    def add_lora(self, lora: LoRARequest | list[Any]) -> bool:
        """Load an adapter (in `LoRARequest`'s positional layout when called by name); False if it was
        there."""
        raise NotImplementedError(f"{type(self).__name__} has no LoRA support")

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; False if it was not there."""
        raise NotImplementedError(f"{type(self).__name__} has no LoRA support")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted."""
        raise NotImplementedError(f"{type(self).__name__} has no LoRA support")

    def list_loras(self) -> list[int]:
        """Ids of the loaded adapters."""
        return []


class WorkerClassError(Exception):
    """`worker_cls` does not name a class that can be a worker."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot load worker class '{self.name}': {self.reason}"


def resolve_worker_cls(name: str) -> type[Worker]:
    """Import `package.module:Class` or `package.module.Class`; the current directory is searched last.

    Raises `WorkerClassError`.
    """
    found = import_object(name, lambda reason: WorkerClassError(name, reason))
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise WorkerClassError(name, "it is not a subclass of executor.worker.Worker")
    return found
