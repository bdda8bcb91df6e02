"""What an executor and its workers are told."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ExecutorConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Plain data: it is sent to every rank as msgpack."""

    worker_cls: str = "executor.mock_worker:MockWorker"
    model: str = ""
    tensor_parallel_size: int = 1
    distributed_executor_backend: Literal["uni", "mp"] | None = None  # None: uni for one rank, mp for more
    block_size: int = 16
    num_gpu_blocks: int | None = None  # None: the smallest capacity of any rank
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None  # None: what the worker's model allows
    seed: int = 0
    worker_options: dict[str, Any] = msgspec.field(default_factory=dict)
    start_timeout_s: float = 600.0  # for each start phase of a rank
    execute_timeout_s: float = 300.0  # for a step, from broadcast to answer
    warn_after_s: float = 10.0  # a wait this long is logged with who is waited for
    stop_grace_s: float = 5.0  # SIGTERM, then SIGKILL
