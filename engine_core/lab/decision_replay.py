"""Runs a scheduler on a record, without workers, and holds its decisions against the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engine_core.errors import RequestError
from engine_core.lab.record import Entry, Header
from engine_core.lab.snapshot import restore
from engine_core.lab.virtual_clock import VirtualClock
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.plug_in import scheduler_class
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.sampling_params import SamplingParams
from executor.step import EMPTY, Int32s, LoRARequest, ModelRunnerOutput, SchedulerOutput

# The recorded fields of a step, in their order in an entry.
_FIELDS = (
    "slots",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "new_requests",
    "new_block_slots",
    "new_block_ids",
    "finished_slots",
    "preempted_slots",
)


class Difference(Exception):
    """The replayed scheduler decided otherwise than the recorded one. `step_id` is that of the last step."""

    def __init__(self, step_id: int, what: str, recorded: object, replayed: object) -> None:
        super().__init__(f"step {step_id} differs in {what}\n  recorded: {recorded}\n  replayed: {replayed}")
        self.step_id = step_id
        self.what = what
        self.recorded = recorded
        self.replayed = replayed


class GapError(Exception):
    """The record misses entries, so that nothing can be said of what follows."""

    def __init__(self, step_id: int, count: int) -> None:
        super().__init__(
            f"the record has a gap of {count} entries after step {step_id}: "
            "they could not be written as fast as the engine ran"
        )


@dataclass(slots=True)
class Progress:
    """What was replayed so far."""

    requests: int = 0
    refused: int = 0
    finished: int = 0  # from outside
    steps: int = 0
    preemptions: int = 0
    resets: int = 0
    restarts: int = 0


class DecisionReplay:
    """`scheduler` is the state after all entries that were applied."""

    def __init__(self, header: Header) -> None:
        """Raises `ConfigError` if the recorded scheduler class is not there."""
        config = header.config
        self.scheduler: Scheduler = scheduler_class(config)(
            config,
            header.capacity.num_gpu_blocks,
            header.capacity.max_model_len,
            VirtualClock(),
            vocab_size=header.capacity.vocab_size,
        )
        self.progress = Progress()
        self.step: SchedulerOutput | None = None  # the last one planned
        self._refusal: RequestError | None = None  # of the request that was added last

    def run(self, entries: Iterable[list[Any]], until: int | None = None) -> None:
        """Apply entries in order, up to the decisions of step `until` included.

        Raises `Difference` at the first one, `GapError`, and whatever the entries' source raises.
        """
        for entry in entries:
            self.apply(entry)
            if until is not None and self.step is not None and self.step.step_id >= until:
                return

    def apply(self, entry: list[Any]) -> None:
        kind, *fields = entry
        if self._refusal is not None and kind != Entry.REFUSED:
            raise self._differs("the refusal of a request", "taken", f"refused: {self._refusal}")
        if kind == Entry.RESULT:
            self._take_in(*fields)
        elif kind in (Entry.PLAN, Entry.SAME):
            self._plan(kind, fields)
        elif kind == Entry.ADD:
            self._add(*fields)
        elif kind == Entry.REFUSED:
            self._refuse(*fields)
        elif kind == Entry.FINISH:
            ids, reason = fields
            self.progress.finished += len(self.scheduler.finish_requests(ids, FinishReason(reason)))
        elif kind == Entry.PAUSE:
            self.scheduler.set_pause_state(PauseState(fields[0]))
        elif kind == Entry.LIMITS:
            self.scheduler.set_limits(*fields)
        elif kind == Entry.RESET:
            self.scheduler.reset_prefix_cache(fields[0])
            self.progress.resets += 1
        elif kind == Entry.RESTART:
            self.scheduler.restart()
            self.progress.restarts += 1
        elif kind == Entry.ALLOW:
            self.scheduler.allow_only(fields[0])
        elif kind == Entry.STATE:
            restore(self.scheduler, fields[0])
        elif kind == Entry.LOST:
            raise GapError(self._step_id, fields[0])
        else:
            raise ValueError(f"an entry is of unknown kind {kind}")

    @property
    def _step_id(self) -> int:
        return 0 if self.step is None else self.step.step_id

    def _differs(self, what: str, recorded: object, replayed: object) -> Difference:
        return Difference(self._step_id, what, recorded, replayed)

    def _add(
        self,
        request_id: str,
        prompt: bytes,
        params: dict[str, Any],
        client_index: int,
        priority: int,
        arrival_time: float,
        cache_salt: str | None,
        lora: list[Any] | None,
    ) -> None:
        request = Request(
            request_id,
            np.frombuffer(prompt, np.int32),
            msgspec.convert(params, SamplingParams),
            client_index=client_index,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            lora=None if lora is None else msgspec.convert(lora, LoRARequest),
            block_hasher=self.scheduler.hasher,
        )
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            self._refusal = error
        else:
            self.progress.requests += 1

    def _refuse(self, request_id: str, code: str) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is None or refusal.code != code:
            replayed = "taken" if refusal is None else f"refused: {refusal}"
            raise self._differs(f"the refusal of request {request_id}", f"refused: {code}", replayed)
        self.progress.refused += 1

    def _plan(self, kind: int, fields: list[Any]) -> None:
        previous = self.step
        self.step = step = self.scheduler.schedule()
        if step.step_id != fields[0]:
            raise self._differs("its number", fields[0], step.step_id)
        if kind == Entry.SAME:
            if previous is None:
                raise self._differs("its rows", "those of the step before", "there is none before")
            recorded = _going_on(previous, fields)
        else:
            recorded = [_ints(fields[1]), _ints(fields[2]), _ints(fields[3])]
            recorded += [[(*new[:3], _ints(new[3]).tolist()) for new in fields[4]]]
            recorded += [_ints(column) for column in fields[5:]]
        for name, theirs in zip(_FIELDS, recorded, strict=True):
            ours: Any = getattr(step, name)
            if name == "new_requests":
                ours = [(r.slot, r.request_id, r.num_computed_tokens, r.block_ids.tolist()) for r in ours]
                same = ours == theirs
            else:
                same = np.array_equal(ours, theirs)
                ours, theirs = ours.tolist(), theirs.tolist()
            if not same:
                raise self._differs(name, theirs, ours)
        self.progress.steps += 1
        self.progress.preemptions += len(step.preempted_slots)

    def _take_in(self, step_id: int, rows: int, tokens: bytes, counts: bytes | None) -> None:
        sampled = _ints(tokens).reshape(rows, -1) if rows else np.empty((0, 1), np.int32)
        num_sampled = np.ones(rows, np.int32) if counts is None else _ints(counts)
        in_flight = self.scheduler.batch.in_flight
        if not in_flight or in_flight[0].step_id != step_id or len(in_flight[0].requests) != rows:
            raise self._differs(
                "the steps in flight",
                f"step {step_id} with {rows} rows is answered",
                ", ".join(f"step {step.step_id} with {len(step.requests)} rows" for step in in_flight)
                or "none",
            )
        step = SchedulerOutput(step_id, EMPTY, EMPTY, EMPTY)  # only its number matters here
        self.scheduler.update_from_output(step, ModelRunnerOutput(step_id, sampled, num_sampled))


def _ints(data: bytes) -> Int32s:
    return np.frombuffer(data, np.int32)


def _going_on(previous: SchedulerOutput, fields: list[Any]) -> list[Any]:
    """The fields of a step whose entry is SAME."""
    computed = previous.num_computed_tokens + previous.num_scheduled_tokens
    ones = np.ones(len(computed), np.int32)
    return [previous.slots, ones, computed, [], _ints(fields[1]), _ints(fields[2]), EMPTY, EMPTY]
