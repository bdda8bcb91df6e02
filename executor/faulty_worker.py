"""A worker that misbehaves on order, around any other: to see what becomes of the engine.

    --worker-cls executor.faulty_worker:FaultyWorker
    --worker-options '{"faults": [{"kind": "exit", "rank": 1, "step": 20}], ...}'

All other options are those of the worker inside, `faulty_worker_cls` (by default the mock). A fault can also
be ordered while the engine runs, with `collective_rpc("inject", args=[{"kind": "raise"}])`; it strikes once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from executor.batch_state import BatchState
from executor.config import ExecutorConfig
from executor.step import ModelRunnerOutput, SchedulerOutput
from executor.worker import ModelInfo, Worker, resolve_worker_cls

DEFAULT_INNER = "executor.mock_worker:MockWorker"

Kind = Literal["raise", "hang", "exit", "kill", "segfault", "slow", "garbage"]


class InjectedError(RuntimeError):
    """What a "raise" fault raises."""


class Fault(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What goes wrong, and when: all conditions that are given must hold.

    `raise`, `hang` (for ever), `exit` (status 3, with no word to the engine), `kill` (SIGKILL), `segfault`,
    `slow` (by `seconds`), `garbage` (an answer to another question; for `execute_model` only).
    """

    kind: Kind
    at: str = "execute_model"  # or another method of `Worker`, `__init__` included
    rank: int | None = 0  # None: all
    step: int | None = None  # only in this one
    token: int | None = None  # only if the step computes this token id
    request: str | None = None  # only if a request runs whose id begins so
    seconds: float = 1.0
    once: str | None = None  # only if this file is not there, which is then made: restarts do not repeat it


def _with_faults(name: str) -> Callable[..., Any]:
    """A method that goes to the worker inside, unless a fault strikes."""

    def method(self: FaultyWorker, *args: Any, **kwargs: Any) -> Any:
        self._strike(name)
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


class FaultyWorker(Worker):
    """`inner` does the work."""

    def __init__(self, config: ExecutorConfig, rank: int, world_size: int) -> None:
        options = dict(config.worker_options)
        self._faults = msgspec.convert(options.pop("faults", []), list[Fault])
        self._injected: list[Fault] = []
        inner_cls = resolve_worker_cls(options.pop("faulty_worker_cls", DEFAULT_INNER))
        super().__init__(config, rank, world_size)
        self._strike("__init__")
        self.inner = inner_cls(msgspec.structs.replace(config, worker_options=options), rank, world_size)

    def inject(self, fault: dict[str, Any]) -> None:
        """Have a `Fault` strike once, at the next occasion that fits. To be called by name."""
        self._injected.append(msgspec.convert(fault, Fault))

    def execute_model(self, step: SchedulerOutput, batch: BatchState) -> ModelRunnerOutput:
        garbage = self._strike("execute_model", step, batch)
        output = self.inner.execute_model(step, batch)
        if garbage:
            output = msgspec.structs.replace(output, num_sampled=np.full(len(step.slots) + 1, 1, np.int32))
        return output

    def load_model(self) -> ModelInfo:
        self._strike("load_model")
        return self.inner.load_model()

    def kv_cache_capacity(self) -> int:
        self._strike("kv_cache_capacity")
        return self.inner.kv_cache_capacity()

    init_device = _with_faults("init_device")
    initialize_cache = _with_faults("initialize_cache")
    check_health = _with_faults("check_health")
    shutdown = _with_faults("shutdown")
    profile = _with_faults("profile")
    set_log_level = _with_faults("set_log_level")
    barrier = _with_faults("barrier")
    sleep = _with_faults("sleep")
    release_kv_cache = _with_faults("release_kv_cache")
    wake_up = _with_faults("wake_up")
    update_weights = _with_faults("update_weights")
    add_lora = _with_faults("add_lora")
    remove_lora = _with_faults("remove_lora")
    pin_lora = _with_faults("pin_lora")
    list_loras = _with_faults("list_loras")

    def __getattr__(self, name: str) -> Any:
        """Methods of the worker inside that only it has, to be called by name."""
        if name == "inner":  # it was not made yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _strike(self, at: str, step: SchedulerOutput | None = None, batch: BatchState | None = None) -> bool:
        """Do what was ordered. True if the answer is to be garbage."""
        garbage = False
        for fault in [*self._faults, *self._injected]:
            if fault.at != at or fault.rank not in (None, self.rank) or not _fits(fault, step, batch):
                continue
            if fault in self._injected:
                self._injected.remove(fault)
            if fault.once is None or _is_first(fault.once):
                _misbehave(fault, at)
                garbage |= fault.kind == "garbage"
        return garbage


def _fits(fault: Fault, step: SchedulerOutput | None, batch: BatchState | None) -> bool:
    if step is None or batch is None:
        return True
    if fault.step is not None and fault.step != step.step_id:
        return False
    if fault.token is not None and not (batch.input_ids(step) == fault.token).any():
        return False
    if fault.request is not None:
        names = [batch.request_ids[slot] or "" for slot in step.slots.tolist()]
        return any(name.startswith(fault.request) for name in names)
    return True


def _is_first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _misbehave(fault: Fault, at: str) -> None:
    print(f"ordered to {fault.kind} in {at}", file=sys.stderr, flush=True)
    if fault.kind == "raise":
        raise InjectedError(f"ordered to raise in {at}")
    if fault.kind == "exit":
        os._exit(3)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    while fault.kind == "hang":
        time.sleep(3600.0)
