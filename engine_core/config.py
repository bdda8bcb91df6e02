"""What an engine is told at its start.

`EngineConfig` is the only place where an option's name, default, range and help live: the command line is
made from its fields (`engine_core.cli.options`), and the names are vLLM's flags with underscores. It is
plain data and travels to a launched engine as msgpack.
"""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from engine_core.kv_events import KVEventsConfig
from executor.config import ExecutorConfig

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
MAX_WAIT_S = 1e6  # what the system calls that wait can take
MAX_SEQS = 1 << 20  # the batch has columns of this length
MAX_OPTIONS_BYTES = 100_000  # encoded; each rank is told in one packet


class ConfigError(ValueError):
    """An option has a value that the engine cannot run with."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field} = {value!r}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Options of one engine. A `title` opens a section of the command line's help.

    Nothing is checked at construction; `validate` checks everything at once.
    """

    model: Annotated[
        str, Meta(title="Model and workers", description="model that the worker loads; the mock needs none")
    ] = ""
    worker_cls: Annotated[
        str, Meta(description="worker class, as package.module:Class or package.module.Class")
    ] = "executor.mock_worker:MockWorker"
    worker_options: Annotated[
        dict[str, Any], Meta(description="options of the worker class; it gives the names")
    ] = msgspec.field(default_factory=dict)
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=1024, description="worker ranks that share each step")
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["uni", "mp"] | None,
        Meta(
            description="uni: the worker runs in the engine process; mp: each rank is a process of its own "
            "(default: uni for one rank, mp for more)"
        ),
    ] = None
    seed: Annotated[
        int, Meta(ge=-(1 << 63), le=(1 << 63) - 1, description="seed of the workers' random choices")
    ] = 0

    block_size: Annotated[int, Meta(title="KV cache", ge=1, description="tokens in a KV block")] = 16
    num_gpu_blocks_override: Annotated[
        int | None, Meta(description="KV blocks in the pool (default: what the smallest rank has room for)")
    ] = None
    enable_prefix_caching: Annotated[
        bool, Meta(description="reuse the KV blocks of equal prompt prefixes")
    ] = True
    prefix_caching_hash_algo: Annotated[
        Literal["sha256", "xxhash"], Meta(description="hash that names a cached block")
    ] = "sha256"

    max_num_seqs: Annotated[
        int, Meta(title="Scheduler", ge=1, le=MAX_SEQS, description="requests that run at the same time")
    ] = 256
    max_num_active_seqs: Annotated[
        Positive | None,
        Meta(description="lower limit on running requests that leaves the workers' buffers alone"),
    ] = None
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="tokens that one step computes at most")
    ] = 2048
    max_num_scheduled_tokens: Annotated[
        Positive | None,
        Meta(description="tokens that one step schedules (default: --max-num-batched-tokens)"),
    ] = None
    max_model_len: Annotated[
        Positive | None,
        Meta(description="prompt and output tokens of one request (default: what the model allows)"),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="order of waiting requests: arrival, or priority then arrival"),
    ] = "fcfs"
    scheduler_cls: Annotated[
        str, Meta(description="scheduler class of your own, as package.module:Class (docs/laboratory.md)")
    ] = ""
    enable_chunked_prefill: Annotated[
        bool, Meta(description="compute a prompt over several steps when it exceeds the budget of one")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="tokens of one prompt per step while others wait; 0: no such limit")
    ] = 0
    long_prefill_token_threshold_adaptive: Annotated[
        bool, Meta(description="raise that limit to a fair share of the budget")
    ] = False
    watermark: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="share of the KV blocks kept free when a request is admitted")
    ] = 0.0
    scheduler_reserve_full_isl: Annotated[
        bool, Meta(description="admit a request only when its whole prompt fits the KV cache")
    ] = True
    prefill_schedule_interval: Annotated[
        int, Meta(ge=1, description="steps between two steps that may compute prompts")
    ] = 1
    max_num_queued_reqs: Annotated[
        Natural | None, Meta(description="requests waiting or running; more are refused (default: no limit)")
    ] = None
    max_num_queued_tokens: Annotated[
        Natural | None,
        Meta(description="prompt tokens not yet computed; more are refused (default: no limit)"),
    ] = None
    async_scheduling: Annotated[
        bool, Meta(description="schedule the next step while the workers compute this one")
    ] = True
    enable_lora: Annotated[bool, Meta(description="serve LoRA adapters; the worker must support them")] = (
        False
    )
    enable_sleep_mode: Annotated[
        bool, Meta(description="let the engine be put to sleep; the worker must support it")
    ] = False
    max_loras: Annotated[int, Meta(ge=1, description="LoRA adapters in one batch at most")] = 1

    record: Annotated[
        str,
        Meta(
            title="Record of decisions",
            description="file to record the scheduler's inputs and decisions in, for replay-decisions",
        ),
    ] = ""
    record_part_mb: Annotated[
        int, Meta(ge=1, description="size at which the record goes on in a new file; FILE becomes FILE.1")
    ] = 256
    record_parts: Annotated[int, Meta(ge=1, description="files of a record that are kept")] = 4

    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            title="Observation",
            description="port for Prometheus metrics and health probes over HTTP; engine i of several takes "
            "the i-th from there; 0: any free one (default: none)",
        ),
    ] = None
    metrics_host: Annotated[str, Meta(description="address that this port is opened at")] = "127.0.0.1"
    kv_events_config: Annotated[
        KVEventsConfig | None,
        Meta(description="where to publish KV events: a JSON object with vLLM's keys (docs/operating.md)"),
    ] = None
    otlp_traces_endpoint: Annotated[
        str,
        Meta(description="OTLP/HTTP address to send spans of requests with trace headers to (default: none)"),
    ] = ""
    log_stats: Annotated[
        bool, Meta(description="report statistics to the front ends, and log them every ten seconds")
    ] = True
    log_format: Annotated[
        Literal["text", "json"], Meta(description="of the log: lines for people, or JSON objects")
    ] = "text"

    on_worker_failure: Annotated[
        Literal["restart", "fail"],
        Meta(
            title="Failures and deadlines",
            description="restart: start the ranks anew, lose no request; fail: end the engine, as vLLM does",
        ),
    ] = "restart"
    max_worker_restarts: Annotated[
        int, Meta(ge=0, description="restarts of the ranks within --restart-window-s; then the engine ends")
    ] = 5
    restart_window_s: Annotated[
        float, Meta(gt=0.0, description="seconds after which a restart does not count any more")
    ] = 300.0
    max_client_backlog: Annotated[
        int,
        Meta(
            ge=1,
            description="tokens held back for a client that does not read; beyond, its requests are ended",
        ),
    ] = 1 << 22
    shutdown_timeout: Annotated[
        float,
        Meta(
            ge=0.0,
            le=MAX_WAIT_S,
            description="seconds to finish running requests after SIGTERM; 0: abort them",
        ),
    ] = 0.0
    start_timeout_s: Annotated[
        float, Meta(gt=0.0, le=MAX_WAIT_S, description="seconds for each start phase of a rank")
    ] = 600.0
    execute_timeout_s: Annotated[
        float, Meta(gt=0.0, le=MAX_WAIT_S, description="seconds for one step, broadcast to answer")
    ] = 300.0
    warn_after_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=MAX_WAIT_S,
            description="seconds after which a wait is logged, with who is waited for",
        ),
    ] = 10.0
    stop_grace_s: Annotated[
        float, Meta(ge=0.0, le=MAX_WAIT_S, description="seconds between SIGTERM and SIGKILL of a rank")
    ] = 5.0

    def validate(self, max_model_len: int | None = None) -> None:
        """Raises `ConfigError` for the first field whose value cannot be run with.

        `max_model_len` is the limit settled with the model; checks that need it wait until it is known.
        """
        for name, type_ in field_types().items():
            _check_type(name, getattr(self, name), type_)
        if not re.fullmatch(r"[\w.]+[.:]\w+", self.worker_cls):
            raise ConfigError("worker_cls", self.worker_cls, "must read package.module:Class")
        if (size := len(msgspec.msgpack.encode(self.worker_options, enc_hook=repr))) > MAX_OPTIONS_BYTES:
            raise ConfigError(
                "worker_options",
                f"({size} bytes)",
                f"must not exceed {MAX_OPTIONS_BYTES} bytes: give the worker the path of a file",
            )
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size > 1:
            raise ConfigError(
                "distributed_executor_backend",
                "uni",
                f"holds one rank, but tensor_parallel_size is {self.tensor_parallel_size}; use mp",
            )
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError(
                "num_gpu_blocks_override",
                self.num_gpu_blocks_override,
                "must be at least 2: block 0 is the null block and holds no tokens",
            )
        if self.prefix_caching_hash_algo == "xxhash" and importlib.util.find_spec("xxhash") is None:
            raise ConfigError(
                "prefix_caching_hash_algo",
                "xxhash",
                "needs the xxhash package: pip install 'engine-core[hash]'",
            )
        self._check_budgets(self.max_model_len if max_model_len is None else max_model_len)

    def _check_budgets(self, max_model_len: int | None) -> None:
        """The relations that vLLM 0.33's scheduler configuration demands."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"must be at least max_num_seqs ({self.max_num_seqs})",
            )
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ConfigError(
                "max_num_active_seqs",
                self.max_num_active_seqs,
                f"must not exceed max_num_seqs ({self.max_num_seqs})",
            )
        scheduled = self.max_num_scheduled_tokens
        if scheduled is not None and scheduled > self.max_num_batched_tokens:
            raise ConfigError(
                "max_num_scheduled_tokens",
                scheduled,
                f"must not exceed max_num_batched_tokens ({self.max_num_batched_tokens})",
            )
        if max_model_len is None:
            return
        name = "max_num_batched_tokens" if scheduled is None else "max_num_scheduled_tokens"
        tokens = self.max_num_batched_tokens if scheduled is None else scheduled
        if not self.enable_chunked_prefill and tokens < max_model_len:
            raise ConfigError(
                name,
                tokens,
                f"must be at least max_model_len ({max_model_len}) without chunked prefill",
            )
        if self.long_prefill_token_threshold > max_model_len:
            raise ConfigError(
                "long_prefill_token_threshold",
                self.long_prefill_token_threshold,
                f"must not exceed max_model_len ({max_model_len})",
            )

    def executor_config(self) -> ExecutorConfig:
        """The part that executor and workers need."""
        return ExecutorConfig(
            worker_cls=self.worker_cls,
            model=self.model,
            tensor_parallel_size=self.tensor_parallel_size,
            distributed_executor_backend=self.distributed_executor_backend,
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks_override,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            seed=self.seed,
            worker_options=self.worker_options,
            start_timeout_s=self.start_timeout_s,
            execute_timeout_s=self.execute_timeout_s,
            warn_after_s=self.warn_after_s,
            stop_grace_s=self.stop_grace_s,
        )

    def to_msgpack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_msgpack(cls, data: bytes) -> EngineConfig:
        """Raises msgspec.ValidationError for data that `to_msgpack` did not write."""
        return msgspec.msgpack.decode(data, type=cls)


@lru_cache(maxsize=1)
def field_types() -> dict[str, Any]:
    """Field name to its type with `Meta` kept, in order of declaration."""
    return get_type_hints(EngineConfig, include_extras=True)


def _check_type(name: str, value: object, type_: Any) -> None:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        choices = literal_choices(type_)
        reason = f"must be one of {', '.join(choices)}" if choices else str(error).replace("`", "")
        raise ConfigError(name, value, reason) from None


def literal_choices(type_: Any) -> list[str]:
    """The values of a Literal, also inside Annotated and optionals; empty for other types."""
    if get_origin(type_) is Literal:
        return [str(value) for value in get_args(type_)]
    return [choice for part in get_args(type_) for choice in literal_choices(part)]
