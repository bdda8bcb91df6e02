"""One rank's worker and its batch: the part of a rank that is the same in the engine's process and in its
own.

`WorkerHost` takes a worker through its start phases, keeps its `BatchState`, and lets no malformed answer
out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from executor.batch_state import BatchState, Bools
from executor.config import ExecutorConfig
from executor.step import Int32s, ModelRunnerOutput, SchedulerOutput
from executor.worker import ModelInfo, Worker, resolve_worker_cls
from transport.collective import Collective

# What `WorkerHost.start` calls its phases, and what the state page calls them.
PAGE_PHASES = {
    "import": "starting",
    "init": "initializing device",
    "load": "loading model",
    "kv": "initializing cache",
}


class BadWorkerOutput(Exception):
    """`execute_model` returned something that does not answer its step."""


class WorkerHost:
    """A worker of `rank`. Call `start`, `initialize_cache`, then `execute` and `call` at will, then
    `shutdown`."""

    def __init__(
        self, config: ExecutorConfig, rank: int, world_size: int, collective: Collective | None = None
    ) -> None:
        self._collective = collective
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self.worker: Worker
        self.batch: BatchState
        self.model: ModelInfo

    def start(self, enter_phase: Callable[[str], None]) -> int:
        """Make the worker and load its model; returns its KV capacity in blocks.

        `enter_phase` hears import, init, load and kv as each begins. Raises whatever the worker raises.
        """
        enter_phase("import")
        worker_cls = resolve_worker_cls(self._config.worker_cls)
        enter_phase("init")
        self.worker = worker_cls(self._config, self._rank, self._world_size)
        self.worker.collective = self._collective
        self.worker.init_device()
        enter_phase("load")
        model = self.worker.load_model()
        if not isinstance(model, ModelInfo):
            raise TypeError(f"load_model returned {type(model).__name__}, not ModelInfo")
        wanted = self._config.max_model_len
        if wanted is not None and wanted > model.max_model_len:
            raise ValueError(f"max_model_len {wanted} exceeds the model's {model.max_model_len}")
        self.model = model
        self.max_model_len = wanted or model.max_model_len
        enter_phase("kv")
        if self._config.num_gpu_blocks is not None:
            return self._config.num_gpu_blocks
        return int(self.worker.kv_cache_capacity())

    def initialize_cache(self, num_blocks: int) -> None:
        """The rest of the kv phase, once all ranks' capacities are known."""
        self.worker.initialize_cache(num_blocks)
        self.batch = BatchState(self._config.max_num_seqs, self.max_model_len, self._config.block_size)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. After an exception the batch is undefined and the host good for nothing but
        `shutdown`."""
        self.batch.apply(step)
        output = self.worker.execute_model(step, self.batch)
        check_output(step, output, self.batch.samples(step), self.model.vocab_size)
        self.batch.record(step, output)
        return output

    def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a public method of the worker by name."""
        function = None if method.startswith("_") else getattr(self.worker, method, None)
        if not callable(function):
            raise AttributeError(f"{type(self.worker).__name__} has no method '{method}'")
        return function(*args, **kwargs)

    def shutdown(self) -> None:
        """Let the worker go, if there is one."""
        if hasattr(self, "worker"):
            self.worker.shutdown()


def check_output(step: SchedulerOutput, output: ModelRunnerOutput, samples: Bools, vocab_size: int) -> None:
    """Raises `BadWorkerOutput` unless `output` answers `step`, whose rows `samples` (n,) are to sample."""
    if not isinstance(output, ModelRunnerOutput):
        raise BadWorkerOutput(f"execute_model returned {type(output).__name__}, not ModelRunnerOutput")
    if output.step_id != step.step_id:
        raise BadWorkerOutput(f"the output is of step {output.step_id}, the step is {step.step_id}")
    n = len(step.slots)
    tokens, counts = output.sampled_token_ids, output.num_sampled
    if not (isinstance(tokens, np.ndarray) and tokens.ndim == 2 and tokens.shape[0] == n and tokens.shape[1]):
        raise BadWorkerOutput(f"sampled_token_ids is {_shape(tokens)}, not int32 ({n}, 1 or more)")
    if not (isinstance(counts, np.ndarray) and counts.shape == (n,)):
        raise BadWorkerOutput(f"num_sampled is {_shape(counts)}, not int32 ({n},)")
    if tokens.dtype != np.int32 or counts.dtype != np.int32:
        raise BadWorkerOutput(f"the dtypes are {tokens.dtype} and {counts.dtype}, not int32")
    if not (counts == samples).all():
        row = int((counts != samples).argmax())
        raise BadWorkerOutput(f"row {row} sampled {counts[row]} tokens instead of {int(samples[row])}")
    chosen: Int32s = tokens[:, 0] if samples.all() else tokens[samples, 0]
    if len(chosen) and int(chosen.view(np.uint32).max()) >= vocab_size:  # negative ones, too
        wrong = chosen[(chosen < 0) | (chosen >= vocab_size)]
        raise BadWorkerOutput(f"sampled token {wrong[0]} is not in the vocabulary of {vocab_size}")
    if output.logprobs is not None:
        lines = output.logprobs
        _check_lines("logprobs", lines.token_ids, lines.logprobs, lines.ranks, len(lines.rows))
        if len(lines.rows) and not (int(lines.rows.min()) >= 0 and int(lines.rows.max()) < n):
            raise BadWorkerOutput(f"logprobs name rows {lines.rows.tolist()} of {n}")
    for prompt in output.prompt_logprobs:
        if not 0 <= prompt.row < n:
            raise BadWorkerOutput(f"prompt_logprobs name row {prompt.row} of {n}")
        _check_lines("prompt_logprobs", prompt.token_ids, prompt.logprobs, prompt.ranks, len(prompt.ranks))


def _check_lines(what: str, token_ids: Any, logprobs: Any, ranks: Any, lines: int) -> None:
    shapes = [_shape(array) for array in (token_ids, logprobs, ranks)]
    width = token_ids.shape[1] if isinstance(token_ids, np.ndarray) and token_ids.ndim == 2 else 1
    wanted = [f"int32 ({lines}, {width})", f"float32 ({lines}, {width})", f"int32 ({lines},)"]
    if shapes != wanted:
        raise BadWorkerOutput(f"{what} has {shapes} instead of {wanted} (token_ids, logprobs, ranks)")


def _shape(array: Any) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
