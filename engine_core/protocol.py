"""The messages between front ends and the engine: vLLM 0.33's engine boundary.

All payloads are MessagePack. Structs with `array_like=True` are positional arrays: their fields' order is
the wire format. Shorter arrays are accepted (a missing tail means the defaults), longer ones too (the rest is
ignored). Everything else is a map keyed by field name. `wire.py` turns frames into these structs and back.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from executor.sampling_params import SamplingParams
from executor.step import LoRARequest

Array = npt.NDArray[Any]

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"  # the single frame on every output when the engine has crashed
COORDINATOR_READY = b"READY"  # the coordinator's frame once all engines have subscribed


class RequestType:
    """First frame of a message to the engine."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class FinishReason(enum.IntEnum):
    """Why a request ended; an output that carries one is its last."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class Tensor:
    """An array that travels under torch's dtype name ("int64") instead of numpy's descriptor ("<i8")."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


# Requests


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """One request, 22 fields."""

    request_id: str
    # A list, or (from our own clients) the tokens as little-endian int32 in a bin.
    prompt_token_ids: list[int] | bytes | None
    mm_features: Any
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float  # Unix seconds
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0  # which output socket answers
    current_wave: int = 0
    priority: int = 0  # lower is earlier
    trace_headers: dict[str, str] | None = None  # echoed in outputs
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: dict[str, Any] | None = None


class UtilityRequest(msgspec.Struct, array_like=True, gc=False):
    """Call of a method of the engine; the answer is a `UtilityOutput` with the same `call_id`."""

    client_index: int
    call_id: int  # echoed exactly; up to 2**64 - 1
    method: str
    args: list[Any] = []


# Outputs


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log-probs of `n` new tokens. Column 0 is the sampled token, then the `k` most likely in rank order."""

    logprob_token_ids: npt.NDArray[np.int32]  # (n, 1 + k)
    logprobs: npt.NDArray[np.float32]  # (n, 1 + k)
    sampled_token_ranks: npt.NDArray[np.int32]  # (n,), 1 is the most likely
    cu_num_generated_tokens: list[int] | None = None


class LogprobsTensors(msgspec.Struct, array_like=True, gc=False):
    """Log-probs of prompt tokens 1..P-1, a row each: the prompt's token, then the `k` most likely."""

    logprob_token_ids: Tensor  # (P - 1, 1 + k) int32
    logprobs: Tensor  # (P - 1, 1 + k) float32
    selected_token_ranks: Tensor  # (P - 1,) int32
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Tensor | None = None


class EngineCoreEvent(msgspec.Struct, gc=False):
    type: EventType
    timestamp: float  # the engine's monotonic clock, seconds


class PrefillStats(msgspec.Struct, gc=False):
    """How a prompt was computed, in tokens; with the first output."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class OutputError(msgspec.Struct, gc=False):
    """Why a request ended with `FinishReason.ERROR`."""

    code: str
    message: str
    retryable: bool = False


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """What a step has for one request, 19 fields."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None  # with the first output that bears tokens
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Array | None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: dict[str, Any] | None = None
    prompt_token_id_logprobs: Tensor | None = None
    error: OutputError | None = None


class PrefixCacheStats(msgspec.Struct, gc=False):
    """Prefix cache look-ups since the previous report; queries and hits in tokens."""

    reset: bool = False  # the cache was reset since then
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0  # the same for requests that come back after a preemption
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = {}


class SchedulerStats(msgspec.Struct, gc=False):
    """State of the scheduler after a step. vLLM's Rust front end wants every key of the first block."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    kv_cache_eviction_events: list[Any] = []

    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = {}
    iteration_details: dict[str, Any] | None = None
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    spec_decoding_stats: dict[str, Any] | None = None
    kv_connector_stats: dict[str, Any] | None = None
    ec_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: dict[str, Any] | None = None
    perf_stats: dict[str, Any] | None = None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call: a failure message, or the pair nil (vLLM's slot for types) and result."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """One message on an output socket, 9 fields.

    Each message is of one family: outputs, stats and finished requests; or a utility answer; or one of the
    two wave notes. vLLM's Rust front end stops for good on a mixed or an empty one.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0  # the engine's monotonic clock, seconds
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


# Start


class HandshakeMessage(msgspec.Struct, gc=False):
    """HELLO and READY, engine to front end. vLLM's Python front end checks both flags."""

    status: str
    local: bool = False  # the front end started this engine as its child
    headless: bool = True  # the engine's host runs no API server of the same deployment


class EngineAddresses(msgspec.Struct):
    """Where the front end listens. Input i and output i belong to the same API server."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class InitMessage(msgspec.Struct):
    """INIT, front end to engine."""

    addresses: EngineAddresses
    parallel_config: dict[str, Any] = {}


class ReadyResponse(msgspec.Struct, kw_only=True, gc=False):
    """The first message on every input socket, engine to front end: what the engine turned out to be."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None = None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int = 1
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool = False
    max_loras: int = 0
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None

    # Of our own; vLLM's front ends pass over what they do not know.
    vocab_size: int | None = None
    worker_cls: str | None = None
