"""Says of one request where it stands and what it waits for."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_core.request import Request, Status
from engine_core.scheduler.history import FinishedRequest, Preemption
from engine_core.scheduler.scheduler import PauseState, Scheduler

_MOST_NAMED = 5  # requests ahead, matches of a short id


class WaitsFor(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that keeps a request from running."""

    what: str  # pause, search, tokens in flight, LoRA, turn, seats, tokens, blocks, interval
    text: str
    needed: int | None = None  # seats, tokens or blocks
    free: int | None = None


class Lost(msgspec.Struct, frozen=True):
    """One preemption."""

    ago_s: float
    step_id: int
    why: str
    winner: str | None  # who needed the blocks


class Explanation(msgspec.Struct, kw_only=True):
    """Times in seconds, as of now."""

    request_id: str
    state: str  # waiting, running, preempted (waits again) or finished
    for_s: float  # in that state
    age_s: float  # since it arrived
    sentences: list[str]  # all of it in words
    prompt_tokens: int
    output_tokens: int
    most_output_tokens: int | None  # None: as many as the model allows
    computed_tokens: int | None  # of prompt and output, steps in flight included; while it runs
    prefix_hit_tokens: int | None  # of the prompt, when it was first admitted; None: not yet
    place: int | None  # of those that wait, 0 is next
    ahead: list[str]  # ids of who waits ahead of it, the first few
    tokens_ahead: int  # prompt and output tokens that those have to compute at most
    waits_for: list[WaitsFor]
    preemptions: list[Lost]
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def text(self) -> str:
        return ". ".join(self.sentences)


class UnknownRequest(LookupError):
    """No live or lately finished request has this id, or several have ids that begin with it."""

    def __init__(self, request_id: str, matches: list[str]) -> None:
        self.request_id = request_id
        self.matches = matches
        shown = ", ".join(matches[:_MOST_NAMED]) + (", ..." if len(matches) > _MOST_NAMED else "")
        text = (
            f"{len(matches)} requests begin with {request_id!r}: {shown}"
            if matches
            else (f"no request {request_id!r} lives, or ended in the last minutes")
        )
        super().__init__(text)


def explain(scheduler: Scheduler, request_id: str) -> Explanation:
    """Of a live request, or one of those that ended in the last minutes; an unambiguous beginning of its id
    will do. Changes nothing. Raises `UnknownRequest`.
    """
    now_s = scheduler.clock.monotonic()
    finished = scheduler.history.finished(now_s)
    known: list[dict[str, Any]] = [scheduler.requests, finished]
    for group in known:
        if request_id in group:
            return _explain(scheduler, group[request_id], now_s)
    matches = [id_ for group in known for id_ in group if request_id and id_.startswith(request_id)]
    if len(matches) != 1:
        raise UnknownRequest(request_id, matches)
    return explain(scheduler, matches[0])


def _explain(scheduler: Scheduler, request: Request | FinishedRequest, now_s: float) -> Explanation:
    if isinstance(request, FinishedRequest):
        return _finished(request, now_s)
    if request.status is Status.RUNNING:
        return _running(scheduler, request, now_s)
    return _waiting(scheduler, request, now_s)


def _finished(request: FinishedRequest, now_s: float) -> Explanation:
    lost = _lost(request.preemptions, now_s)
    ago_s = now_s - request.ended_s
    text = (
        f"ended {_s(ago_s)} ago by {request.finish_reason} after {_s(request.ended_s - request.queued_s)}, "
        f"with {request.num_output_tokens} tokens for a prompt of {request.num_prompt_tokens}, "
        f"{request.num_cached_tokens} of them from the prefix cache"
    )
    return Explanation(
        request_id=request.request_id,
        state="finished",
        for_s=ago_s,
        age_s=now_s - request.queued_s,
        sentences=[text, *_preemption_text(request.request_id, lost)],
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        most_output_tokens=None,
        computed_tokens=None,
        prefix_hit_tokens=request.num_cached_tokens,
        place=None,
        ahead=[],
        tokens_ahead=0,
        waits_for=[],
        preemptions=lost,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def _running(scheduler: Scheduler, request: Request, now_s: float) -> Explanation:
    row = scheduler.batch.row(scheduler.batch.requests.index(request))
    output_tokens = row.known - request.num_prompt_tokens
    waits_for = []
    if scheduler.pause_state is PauseState.PAUSED_ALL:
        waits_for.append(WaitsFor("pause", "the engine is paused, running requests too"))
    if row.computed < row.known - 1:
        doing = f"its prompt is computed: {row.computed} of {row.known} tokens"
    else:
        doing = f"it decodes: {output_tokens} of {_most(scheduler, request)} tokens are out"
    text = f"has run for {_s(now_s - request.since_s)} in {len(request.block_ids)} blocks; {doing}"
    lost = _lost(scheduler.history.preemptions.get(request, []), now_s)
    sentences = [
        text,
        *(wait.text for wait in waits_for),
        *_hit_text(request),
        *_preemption_text(request.request_id, lost),
    ]
    return _live(request, "running", now_s, sentences, output_tokens, waits_for, lost, computed=row.computed)


def _waiting(scheduler: Scheduler, request: Request, now_s: float) -> Explanation:
    queue = list(scheduler.waiting)
    place = queue.index(request)
    ahead = queue[:place]
    tokens_ahead = sum(other.num_known_tokens for other in ahead)
    waits_for = _obstacles(scheduler, request)
    if ahead:
        text = f"{place} requests with {tokens_ahead} tokens are ahead of it"
        waits_for.insert(0, WaitsFor("turn", text, needed=place))
    lost = _lost(scheduler.history.preemptions.get(request, []), now_s)
    state = "preempted" if request.num_preemptions else "waiting"
    sentences = [f"has waited for {_s(now_s - request.since_s)}"]
    sentences += [wait.text for wait in waits_for] or ["nothing keeps it from running in the next step"]
    sentences += [*_hit_text(request), *_preemption_text(request.request_id, lost)]
    output_tokens = request.num_known_tokens - request.num_prompt_tokens
    answer = _live(request, state, now_s, sentences, output_tokens, waits_for, lost)
    answer.place, answer.tokens_ahead = place, tokens_ahead
    answer.ahead = [other.request_id for other in ahead[:_MOST_NAMED]]
    return answer


def _live(
    request: Request,
    state: str,
    now_s: float,
    sentences: list[str],
    output_tokens: int,
    waits_for: list[WaitsFor],
    lost: list[Lost],
    computed: int | None = None,
) -> Explanation:
    admitted = state != "waiting"
    return Explanation(
        request_id=request.request_id,
        state=state,
        for_s=now_s - request.since_s,
        age_s=now_s - request.queued_s,
        sentences=sentences,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=output_tokens,
        most_output_tokens=request.params.max_tokens,
        computed_tokens=computed,
        prefix_hit_tokens=request.num_cached_tokens if admitted else None,
        place=None,
        ahead=[],
        tokens_ahead=0,
        waits_for=waits_for,
        preemptions=lost,
        finish_reason=None,
        stop_reason=None,
    )


def _obstacles(scheduler: Scheduler, request: Request) -> list[WaitsFor]:
    """What would keep a waiting request from running, were it the first; as `Admission.admit` decides."""
    batch, admission = scheduler.batch, scheduler.admission
    found: list[WaitsFor] = []
    if scheduler.pause_state is PauseState.PAUSED_ALL:
        found.append(WaitsFor("pause", "the engine is paused"))
    elif scheduler.pause_state is PauseState.PAUSED_NEW and request not in admission.interrupted:
        found.append(WaitsFor("pause", "the engine is paused for requests that do not run yet"))
    if admission.allowed is not None and request.request_id not in admission.allowed:
        found.append(WaitsFor("search", "the engine searches for the request that makes the workers fail"))
    if request.num_stale_tokens and not request.drop_stale_output:
        text = f"{request.num_stale_tokens} of its tokens are still with the workers since it was preempted"
        found.append(WaitsFor("tokens in flight", text))
    if request.lora is not None:
        loras = {other.lora.int_id: other.lora.name for other in batch.requests if other.lora is not None}
        most = scheduler.limits.max_loras
        if request.lora.int_id not in loras and len(loras) >= most:
            text = (
                f"its LoRA adapter {request.lora.name} has no place: "
                f"{', '.join(sorted(loras.values()))} run, {most} at most"
            )
            found.append(WaitsFor("LoRA", text, needed=1, free=0))
    if len(batch) >= scheduler.max_running:
        found.append(WaitsFor("seats", f"all {len(batch)} seats are taken", needed=1, free=0))
    return found + _needs(scheduler, request)


def _needs(scheduler: Scheduler, request: Request) -> list[WaitsFor]:
    """Tokens of a step and blocks that a waiting request lacks."""
    config, kv, pool = scheduler.config, scheduler.kv, scheduler.kv.pool
    c = scheduler.batch.columns()
    known = request.num_known_tokens
    hits: list[int] = []
    if kv.hasher is not None and not request.skip_reading_prefix_cache:
        hits = pool.find(request.block_hashes, (known - 1) // kv.block_size)
    found: list[WaitsFor] = []

    wanted = int((c.known + c.placeholders - c.computed).clip(min=0).sum())
    budget = max(0, scheduler.budget - wanted)
    needed = known - len(hits) * kv.block_size
    if config.enable_chunked_prefill:
        needed = min(needed, 1)
    if needed > budget:
        text = f"running requests use {wanted} of the {scheduler.budget} tokens of a step"
        found.append(WaitsFor("tokens", text, needed=needed, free=budget))

    reserved = (
        known if config.scheduler_reserve_full_isl else min(known, len(hits) * kv.block_size + max(budget, 1))
    )
    blocks = -(-reserved // kv.block_size) - len(hits)
    free = pool.num_free - pool.num_unheld(hits) - (kv.watermark_blocks if len(scheduler.batch) else 0)
    if blocks > free:
        text = f"it needs {blocks} more KV blocks, {max(free, 0)} are to be had"
        found.append(WaitsFor("blocks", text, needed=blocks, free=max(free, 0)))
    if config.prefill_schedule_interval > 1 and not found:
        text = f"prompts are computed in every {config.prefill_schedule_interval}th step only"
        found.append(WaitsFor("interval", text))
    return found


def _most(scheduler: Scheduler, request: Request) -> int:
    """Output tokens at which the length ends a request."""
    return scheduler.admission.limit(request) - request.num_prompt_tokens


def _lost(preemptions: list[Preemption], now_s: float) -> list[Lost]:
    return [Lost(now_s - lost.at_s, lost.step_id, lost.why, lost.winner) for lost in preemptions]


def _hit_text(request: Request) -> list[str]:
    if not request.num_cached_tokens:
        return []
    return [f"{request.num_cached_tokens} of {request.num_prompt_tokens} prompt tokens were cached"]


def _preemption_text(request_id: str, lost: list[Lost]) -> list[str]:
    if not lost:
        return []
    last = lost[-1]
    times = "once" if len(lost) == 1 else f"{len(lost)} times, last"
    text = f"preempted {times} {_s(last.ago_s)} ago in step {last.step_id}: {last.why}"
    if last.winner == request_id:
        text += ", and it was the one to yield"
    elif last.winner is not None:
        text += f", for request {last.winner}"
    return [text]


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
