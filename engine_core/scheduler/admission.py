"""Who waits, and who of them may run: second half of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine_core.config import EngineConfig
from engine_core.counters import Counters
from engine_core.errors import RequestError
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.metrics import EngineMetrics
from engine_core.protocol import EventType
from engine_core.request import Request, Status
from engine_core.scheduler.adapters import AdapterCounts
from engine_core.scheduler.running import ALWAYS, ONCE, REPEATS, RunningBatch
from engine_core.scheduler.running_phase import StepRules, next_name
from engine_core.scheduler.waiting import WaitingQueue
from executor.step import NewRequest
from transport.clock import Clock


@dataclass(slots=True)
class Admitted:
    """Requests that a step lets into the batch. Their rows are behind those of who ran already."""

    requests: list[NewRequest] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each, >= 1
    prefills: bool = False  # one has more than its last token to compute


class Admission:
    """The waiting requests of one scheduler."""

    def __init__(
        self,
        config: EngineConfig,
        queue: WaitingQueue,
        max_model_len: int,
        batch: RunningBatch,
        kv: KVCacheManager,
        clock: Clock,
        counters: Counters,
        metrics: EngineMetrics | None,
    ) -> None:
        self.queue = queue
        self.deferred: set[Request] = set()  # those that the last scans passed over
        self.allowed: frozenset[str] | None = None  # ids of who may run; None: everybody
        self.interrupted: set[Request] = set()  # ran when the workers were replaced, and wait since
        self.queued_tokens = 0  # prompt tokens of requests without output, running ones included
        self._config = config
        self._max_model_len = max_model_len
        self._batch = batch
        self._kv = kv
        self._clock = clock
        self._counters = counters
        self._metrics = metrics
        self.adapters = AdapterCounts()
        self.max_running = config.max_num_active_seqs or config.max_num_seqs
        self._max_loras = config.max_loras if config.enable_lora else 0

    def add(self, request: Request, num_live: int) -> None:
        """A request arrives while `num_live` others live.

        Raises `RequestError` "queue_full" (retryable) beyond --max-num-queued-reqs or
        --max-num-queued-tokens.
        """
        config = self._config
        most = config.max_num_queued_reqs
        if most is not None and num_live >= most:
            self._counters.refused_by_requests += 1
            raise _queue_full(request, f"the engine holds {num_live} requests of at most {most}")
        most = config.max_num_queued_tokens
        if most is not None and self.queued_tokens >= most:
            self._counters.refused_by_tokens += 1
            raise _queue_full(request, f"{self.queued_tokens} prompt tokens are queued, the limit is {most}")
        self.queue.add(request)
        self.queued_tokens += request.num_prompt_tokens
        request.queued_s = request.since_s = self._clock.monotonic()
        if config.log_stats:
            request.record_event(EventType.QUEUED, request.queued_s)

    def remove(self, request: Request) -> None:
        """A waiting request ends."""
        self.queue.remove(request)
        self.deferred.discard(request)
        self.interrupted.discard(request)

    def prefilled(self, request: Request) -> None:
        """A request's first output is there, or it ends without one."""
        self.queued_tokens -= request.num_prompt_tokens

    def limit(self, request: Request) -> int:
        """Known tokens at which the length ends a request."""
        return min(
            self._max_model_len,
            request.num_prompt_tokens + request.max_tokens,
            self._kv.max_tokens + 1,  # the last token needs no KV
        )

    def admit(self, rules: StepRules, budget: int, only_interrupted: bool = False) -> Admitted:
        """Let waiting requests run while `budget` tokens, seats and blocks last."""
        config, queue, batch, kv = self._config, self.queue, self._batch, self._kv
        admitted = Admitted()
        passed_over: list[Request] = []
        metrics = self._metrics
        now = self._clock.monotonic()
        loras = {r.lora.int_id for r in batch.requests if r.lora is not None} if self._max_loras else set()
        while budget > 0 and len(queue) and len(batch.requests) < self.max_running:
            request = queue.peek()
            if self._must_pass_over(request, loras) or (only_interrupted and request not in self.interrupted):
                passed_over.append(queue.pop())
                self.deferred.add(request)
                continue

            known = request.num_known_tokens
            hits = kv.find_prefix(request, known)
            computed = len(hits) * kv.block_size
            if not request.num_preemptions:
                request.num_cached_tokens = computed
            prefill = computed < known - 1
            if rules.defer_prefills and prefill:
                break
            count = known - computed
            if rules.long_prefill_limit:
                count = min(count, rules.long_prefill_limit)
            if count > budget:
                if not config.enable_chunked_prefill:
                    break
                count = budget
            reserve_all, keep_watermark = config.scheduler_reserve_full_isl, bool(batch.requests)
            if not kv.admit(request, hits, computed + count, known, reserve_all, keep_watermark):
                break
            kv.record_lookup(request, known, len(hits))
            kv.name_blocks([request], [computed + count])

            queue.pop()
            self.deferred.discard(request)
            self.interrupted.discard(request)
            if config.log_stats:
                request.record_event(EventType.SCHEDULED, now)
            self._enter_batch(request, computed)
            request.since_s = now
            self.adapters.scheduled(request)
            if metrics is not None:
                metrics.scheduled(request, now)
            admitted.requests.append(_in_full(request, computed))
            admitted.counts.append(count)
            admitted.prefills |= prefill
            budget -= count
            if request.lora is not None:
                loras.add(request.lora.int_id)
        for request in reversed(passed_over):
            queue.put_back(request)
        return admitted

    def _must_pass_over(self, request: Request, loras: set[int]) -> bool:
        """Whether others may overtake a request: `loras` are the adapters of who runs."""
        if request.num_stale_tokens and not request.drop_stale_output:
            return True  # what is in flight of it will be delivered; it must not be sampled again
        if self.allowed is not None and request.request_id not in self.allowed:
            return True
        lora = request.lora
        return lora is not None and lora.int_id not in loras and len(loras) >= self._max_loras

    def _enter_batch(self, request: Request, computed: int) -> None:
        request.status = Status.RUNNING
        request.prompt_logprobs = None  # those of an earlier run are computed again
        care = 0
        if not request.prefilled or request.events:
            care |= ONCE
        if request.params.logprobs is not None:
            care |= ALWAYS
        if request.params.repetition_detection is not None:
            care |= REPEATS
        self._batch.add(request, computed, self.limit(request), next_name(request, self._kv), care)


def _in_full(request: Request, computed: int) -> NewRequest:
    return NewRequest(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.known_tokens(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=computed,
        block_ids=np.fromiter(request.block_ids, np.int32, len(request.block_ids)),
        params=request.params,
        lora=request.lora,
    )


def _queue_full(request: Request, reason: str) -> RequestError:
    return RequestError(
        "queue_full", f"{reason}; try again later", retryable=True, request_id=request.request_id
    )
