"""One request, from its arrival to its last output.

What changes every step while a request runs (counts of tokens, the last tokens sampled) lives in the
columns of `scheduler.running.RunningBatch`; this object holds what is rare, and everything while the
request waits.
"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING

import numpy as np

from engine_core.protocol import EngineCoreEvent, EngineCoreRequest, EventType, FinishReason, PrefillStats
from engine_core.validation import RequestLimits, deadline_of, validate_request
from executor.sampling_params import SamplingParams
from executor.step import Int32s, LoRARequest, PromptLogprobs

if TYPE_CHECKING:
    from engine_core.kv_cache.hashing import BlockHasher, PrefixHash


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits again; has been running
    FINISHED = 3


class Request:
    """A request and its token ids.

    `prompt` is int32. Token ids sampled so far are in `output` (int32, native order) except those of the last
    partial block of a running request, which are in the batch.
    """

    __slots__ = (
        "abort_immediately",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "client_index",
        "deadline_s",
        "drop_stale_output",
        "events",
        "finish_reason",
        "lora",
        "max_tokens",
        "num_cached_tokens",
        "num_named_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "output",
        "params",
        "prefilled",
        "prefix_hash",
        "priority",
        "prompt",
        "prompt_logprobs",
        "queue_entry",
        "queued_s",
        "request_id",
        "since_s",
        "skip_reading_prefix_cache",
        "slot",
        "status",
        "stop_reason",
        "stop_token_ids",
        "trace_headers",
        "wire_prefix",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Int32s,
        params: SamplingParams,
        *,
        client_index: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
        trace_headers: dict[str, str] | None = None,
        abort_immediately: bool = False,
        deadline_s: float | None = None,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        """Hashes the prompt's full blocks if a hasher is given. `params.max_tokens` None means no limit."""
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.lora = lora
        self.trace_headers = trace_headers
        self.abort_immediately = abort_immediately
        self.deadline_s = deadline_s  # from its arrival at the engine on; None: it has all the time
        self.wire_prefix: bytes | None = None  # set and used by the encoder of outputs

        self.num_prompt_tokens = len(prompt)
        self.max_tokens = params.max_tokens if params.max_tokens is not None else sys.maxsize
        self.stop_token_ids = frozenset(params.stop_token_ids) if params.stop_token_ids else None
        # Prompt log-probs need every position computed.
        skip = params.skip_reading_prefix_cache
        self.skip_reading_prefix_cache = params.prompt_logprobs is not None if skip is None else skip

        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] | None = None
        self.queued_s = 0.0  # when it arrived, and when it got its status; monotonic clock
        self.since_s = 0.0
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, when it was first admitted
        self.prefilled = False  # its first output is out
        self.prompt_logprobs: list[PromptLogprobs] | None = None  # so far, until the first output

        self.slot = -1  # row in the workers' batch; -1: not running
        self.output = bytearray()
        self.block_ids: list[int] = []
        self.num_named_blocks = 0  # blocks at the front of block_ids that others may share
        self.block_hashes: list[bytes] = []
        self.prefix_hash: PrefixHash | None = None  # of the tokens in those blocks, to go on from
        # Tokens of steps that were in flight when the request was preempted, and whether what those steps
        # sample is dropped. While they are in flight the request does not run again, unless it is dropped.
        self.num_stale_tokens = 0
        self.drop_stale_output = False
        self.queue_entry: object | None = None  # the priority queue's

        if block_hasher is not None:
            self.extend_hashes(block_hasher)

    @classmethod
    def from_wire(
        cls, wire: EngineCoreRequest, limits: RequestLimits, block_hasher: BlockHasher | None = None
    ) -> Request:
        """Validate and convert. Raises `RequestError` with code "validation_error"."""
        prompt, params = validate_request(wire, limits)
        return cls(
            wire.request_id,
            prompt,
            params,
            client_index=wire.client_index,
            priority=wire.priority,
            arrival_time=wire.arrival_time,
            cache_salt=wire.cache_salt,
            lora=wire.lora_request,
            trace_headers=wire.trace_headers,
            abort_immediately=wire.abort_immediately,
            deadline_s=deadline_of(params),
            block_hasher=block_hasher,
        )

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens})"

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens. Not for a running request: its last ones are in the batch."""
        return self.num_prompt_tokens + len(self.output) // 4

    def output_tokens(self) -> Int32s:
        """Output tokens so far, a copy. Not for a running request."""
        return np.frombuffer(bytes(self.output), np.int32)

    def known_tokens(self) -> Int32s:
        """Prompt, then output tokens. Not for a running request."""
        if not self.output:
            return self.prompt
        return np.concatenate((self.prompt, self.output_tokens()))

    def extend_hashes(self, hasher: BlockHasher) -> None:
        """Name the full blocks of known tokens that have no name yet. Not for a running request."""
        size, named = hasher.block_size, len(self.block_hashes)
        full = self.num_known_tokens // size
        if full > named:
            tokens = self.known_tokens()[named * size : full * size]
            self.block_hashes += hasher.extend(self._prefix_hash(hasher), tokens.tobytes())

    def add_block_hash(self, hasher: BlockHasher, block: bytes) -> None:
        """Name the block that a running request has filled, and filed: the int32 tokens `block`."""
        prefix = self._prefix_hash(hasher)
        prefix.update(block)
        self.block_hashes.append(prefix.digest())

    def _prefix_hash(self, hasher: BlockHasher) -> PrefixHash:
        """The hash of all tokens that are in named blocks."""
        prefix = getattr(self, "prefix_hash", None)  # a request that is restored from data has none
        if prefix is None:
            prefix = self.prefix_hash = self._start_hash(hasher)
        return prefix

    def _start_hash(self, hasher: BlockHasher) -> PrefixHash:
        prefix = hasher.start(self.cache_salt, self.lora)
        if self.block_hashes:
            prefix.update(self.known_tokens()[: len(self.block_hashes) * hasher.block_size].tobytes())
        return prefix

    def record_event(self, type_: EventType, timestamp: float) -> None:
        event = EngineCoreEvent(type_, timestamp)
        if self.events is None:
            self.events = [event]
        else:
            self.events.append(event)

    def take_events(self) -> list[EngineCoreEvent] | None:
        events, self.events = self.events, None
        return events

    def prefill_stats(self, block_size: int) -> PrefillStats:
        """How the prompt was computed; for the first output, while the request's blocks are still held."""
        prompt, cached = self.num_prompt_tokens, self.num_cached_tokens
        return PrefillStats(
            num_prompt_tokens=prompt,
            num_computed_tokens=prompt - cached,
            num_cached_tokens=cached,
            num_local_cached_tokens=cached,
            num_cache_creation_tokens=max(0, min(self.num_named_blocks * block_size, prompt) - cached),
        )
