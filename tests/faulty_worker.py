"""Mock workers that misbehave on order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from executor.batch_state import BatchState
from executor.config import ExecutorConfig
from executor.mock_worker import MockWorker
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.worker import ModelInfo


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """`kind`: raise, exit, kill, hang, or what `garble` knows. `at`: a method; of steps, number `step`."""

    kind: str
    at: str = "execute_model"
    rank: int = 0
    step: int = 1


def strike(kind: str) -> None:
    print(f"about to {kind}", file=sys.stderr)
    if kind == "raise":
        raise RuntimeError("as ordered")
    if kind == "exit":
        sys.exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(60)


def garble(kind: str, output: ModelRunnerOutput) -> Any:
    n = len(output.num_sampled)
    if kind == "not an output":
        return {"tokens": [1]}
    if kind == "wrong step":
        output.step_id += 1
    elif kind == "missing row":
        output.sampled_token_ids = output.sampled_token_ids[:-1]
    elif kind == "flat tokens":
        output.sampled_token_ids = output.sampled_token_ids[:, 0]
    elif kind == "wrong dtype":
        output.sampled_token_ids = output.sampled_token_ids.astype(np.int64)
    elif kind == "too many":
        output.num_sampled = np.full(n, 2, np.int32)
    elif kind == "none sampled":
        output.num_sampled = np.zeros(n, np.int32)
    elif kind == "beyond the vocabulary":
        output.sampled_token_ids = output.sampled_token_ids + np.int32(32000)
    elif kind == "negative":
        output.sampled_token_ids = output.sampled_token_ids - np.int32(32000)
    return output


class FaultyWorker(MockWorker):
    """`worker_options["faults"]`: a list of `Fault`s."""

    def __init__(self, config: ExecutorConfig, rank: int, world_size: int) -> None:
        options = dict(config.worker_options)
        self.faults = msgspec.convert(options.pop("faults", []), list[Fault])
        self.log = options.pop("log", None)
        self.grandchild: subprocess.Popen[bytes] | None = None
        super().__init__(msgspec.structs.replace(config, worker_options=options), rank, world_size)
        self.strike("__init__")

    def strike(self, at: str) -> None:
        for fault in self.faults:
            if fault.at == at and fault.rank == self.rank:
                strike(fault.kind)

    def init_device(self) -> None:
        self.strike("init_device")

    def load_model(self) -> ModelInfo:
        self.strike("load_model")
        return super().load_model()

    def kv_cache_capacity(self) -> int:
        self.strike("kv_cache_capacity")
        return super().kv_cache_capacity()

    def initialize_cache(self, num_blocks: int) -> None:
        self.strike("initialize_cache")
        super().initialize_cache(num_blocks)

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        output = super().execute_model(step, batch)
        for fault in self.faults:
            if (fault.at, fault.rank, fault.step) == ("execute_model", self.rank, step.step_id):
                strike(fault.kind)
                output = garble(fault.kind, output)
        return output

    def shutdown(self) -> None:
        if self.log is not None:
            with Path(self.log).open("a") as log:
                log.write(f"rank {self.rank} shut down\n")
        self.strike("shutdown")

    # To be called by name.

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return [self.rank, *args, kwargs]

    def nap(self, seconds: float, only_rank: int | None = None) -> float:
        if only_rank in (None, self.rank):
            time.sleep(seconds)
        return seconds

    def fail_on(self, rank: int) -> str:
        if self.rank == rank:
            raise ValueError(f"rank {rank} was asked to")
        return "fine"

    def unspeakable(self) -> object:
        return object()

    def ignore_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def start_grandchild(self) -> int:
        self.grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return self.grandchild.pid

    def signals_ignored(self) -> bool:
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN

    def session(self) -> int:
        return os.getsid(0)


class SmallRankOne(MockWorker):
    """Rank 1 has less memory than the others."""

    def kv_cache_capacity(self) -> int:
        return 100 - 30 * (self.rank == 1)

    def num_blocks(self) -> int:
        return len(self.kv_cache) // self.config.block_size


class OtherModelOnRankOne(MockWorker):
    def load_model(self) -> ModelInfo:
        return ModelInfo(100 + self.rank, 1000)


class NotAWorker:
    pass
