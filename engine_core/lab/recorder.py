"""Records an engine's decisions without holding up its loop.

The loop's thread makes a step and its result into a few hundred bytes (holding on to their arrays for another
thread to do so would cost it more) and queues them; a thread of the recorder writes them. If that falls
behind, entries are dropped and the record says how many.

When a file is large enough, the loop's thread takes a snapshot of the scheduler's state, a matter of
milliseconds, with which the next file begins: each file can be replayed by itself.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np

from engine_core.config import ConfigError, EngineConfig
from engine_core.errors import RequestError
from engine_core.lab import snapshot
from engine_core.lab.record import Entry, Header, RecordWriter, is_record
from engine_core.protocol import FinishReason
from engine_core.request import Request
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.base import EngineCapacity
from executor.step import Int32s, ModelRunnerOutput, SchedulerOutput
from transport.clock import Clock

logger = logging.getLogger("engine_core")

MOST_PENDING = 1 << 14  # entries; two for each step
_ENTRIES_PER_FRAME = 512
_WRITE_EVERY_S = 0.1  # what a crash of the process costs the record


class DecisionRecorder:
    """A `SchedulerObserver` that writes to a file from its construction until `close`.

    `path` is the newest file; `path.1` is the one before, and so on. A file that was there before is kept in
    the same way, so that the record of an engine that crashed survives the start of its successor.
    """

    def __init__(self, path: str, header: Header, part_bytes: int = 256 << 20, num_parts: int = 4) -> None:
        """Raises OSError if the file cannot be written, or is there and no record."""
        self._path = path
        self._header = header
        self._part_bytes = part_bytes
        self._num_parts = num_parts
        self._make_room()
        self._writer = RecordWriter(path, header)
        self._first_bytes = self._writer.size_bytes  # of the file, with the state that it begins with
        self._pending: deque[tuple[Any, ...]] = deque()
        self._num_lost = 0
        self._wants_state = False  # set by the recorder's thread, cleared by the loop's
        self._scheduler: Scheduler
        self._failed = False
        self._compress = _StepCompressor()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what is pending. Idempotent."""
        if self._num_lost:
            self._note_loss()
        self._closing.set()
        self._thread.join()
        self._writer.close()

    # On the loop's thread.

    def attached(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def arrived(self, request: Request) -> None:
        self._put(
            (
                Entry.ADD,
                request.request_id,
                request.prompt,
                request.params,
                request.client_index,
                request.priority,
                request.arrival_time,
                request.cache_salt,
                request.lora,
            )
        )

    def refused(self, request: Request, error: RequestError) -> None:
        self._put((Entry.REFUSED, request.request_id, error.code))

    def finished(self, request_ids: list[str] | None, reason: FinishReason) -> None:
        self._put((Entry.FINISH, request_ids, reason))

    def planned(self, step: SchedulerOutput) -> None:
        self._put(self._compress.plan(step))
        if self._wants_state and len(self._pending) < MOST_PENDING:
            self._wants_state = False
            self._compress = _StepCompressor()  # nothing refers to the file before
            self._put((Entry.STATE, snapshot.take(self._scheduler)))

    def answered(self, output: ModelRunnerOutput) -> None:
        self._put(self._compress.result(output))

    def pause_state_set(self, state: PauseState) -> None:
        self._put((Entry.PAUSE, state))

    def limits_set(self, max_running: int, budget: int) -> None:
        self._put((Entry.LIMITS, max_running, budget))

    def prefix_cache_reset(self, reset_running: bool) -> None:
        self._put((Entry.RESET, reset_running))

    def restarted(self) -> None:
        self._put((Entry.RESTART,))

    def allowed_only(self, request_ids: list[str] | None) -> None:
        self._put((Entry.ALLOW, request_ids))

    def _put(self, entry: tuple[Any, ...]) -> None:
        if len(self._pending) >= MOST_PENDING:
            self._num_lost += 1
            return
        if self._num_lost:
            self._note_loss()
            self._wants_state = True  # a new file can be replayed again
        self._pending.append(entry)

    def _note_loss(self) -> None:
        self._pending.append((Entry.LOST, self._num_lost))
        self._num_lost = 0

    # On the recorder's thread.

    def _write_until_closed(self) -> None:
        while not self._closing.wait(_WRITE_EVERY_S):
            self._write_pending()
        self._write_pending()

    def _write_pending(self) -> None:
        """What is pending now. What comes meanwhile waits for the next turn, or this would never end."""
        left = len(self._pending)
        while left:
            frame: list[tuple[Any, ...]] = []
            for _ in range(min(left, _ENTRIES_PER_FRAME)):
                entry = self._pending.popleft()
                if entry[0] == Entry.STATE:
                    self._write(frame)
                    self._next_part()
                    frame = [entry]
                elif entry[0] == Entry.ADD:
                    frame.append((*entry[:2], entry[2].tobytes(), *entry[3:]))
                else:
                    frame.append(entry)
                left -= 1
            self._write(frame)

    def _write(self, frame: list[tuple[Any, ...]]) -> None:
        if self._failed or not frame:
            return
        try:
            self._writer.write(frame)
        except OSError as error:
            self._fail(error)
            return
        if frame[0][0] == Entry.STATE:
            self._first_bytes = self._writer.size_bytes
        if self._writer.size_bytes - self._first_bytes >= self._part_bytes:
            self._first_bytes = self._writer.size_bytes  # ask once
            self._wants_state = True

    def _next_part(self) -> None:
        if self._failed:
            return
        self._writer.close()
        self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
        try:
            self._make_room()
            self._writer = RecordWriter(self._path, self._header)
        except OSError as error:
            self._fail(error)

    def _make_room(self) -> None:
        """Every file of the record moves on by one; the oldest is dropped."""
        names = [self._path, *(f"{self._path}.{number}" for number in range(1, self._num_parts))]
        for name in names:
            if os.path.isfile(name) and not is_record(name):
                raise FileExistsError(errno.EEXIST, "there is another file, which is no record", name)
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if os.path.isfile(newer):  # a device stays where it is
                os.replace(newer, older)

    def _fail(self, error: OSError) -> None:
        self._failed = True  # the engine serves on
        logger.error("Recording to %s has stopped: %s", self._path, error.strerror)


def start_recorder(
    config: EngineConfig, capacity: EngineCapacity, engine_index: int, clock: Clock
) -> DecisionRecorder:
    """The recorder that `config` asks for; engines beyond the first have a number in their file's name.

    Raises `ConfigError` if the file cannot be written.
    """
    header = Header(
        engine_version=version("engine-core"), started=clock.time(), config=config, capacity=capacity
    )
    path = f"{config.record}.engine-{engine_index}" if engine_index else config.record
    try:
        return DecisionRecorder(path, header, config.record_part_mb << 20, config.record_parts)
    except OSError as error:
        raise ConfigError(
            "record", path, f"{error.filename or path} cannot be written: {error.strerror}"
        ) from error


class _StepCompressor:
    """Writes a step that only goes on as less."""

    def __init__(self) -> None:
        self._slots = b""
        self._expected: Int32s = np.empty(0, np.int32)  # computed tokens of the next step, if it goes on
        self._ones = b""

    def plan(self, step: SchedulerOutput) -> tuple[Any, ...]:
        slots, counts = step.slots.tobytes(), step.num_scheduled_tokens.tobytes()
        computed = step.num_computed_tokens.tobytes()
        goes_on = (
            slots == self._slots
            and counts == self._some_ones(len(counts))
            and computed == self._expected.tobytes()
            and not (step.new_requests or len(step.finished_slots) or len(step.preempted_slots))
        )
        self._slots = slots
        self._expected = step.num_computed_tokens + step.num_scheduled_tokens
        blocks = (step.new_block_slots.tobytes(), step.new_block_ids.tobytes())
        if goes_on:
            return (Entry.SAME, step.step_id, *blocks)
        new = [
            (request.slot, request.request_id, request.num_computed_tokens, request.block_ids.tobytes())
            for request in step.new_requests
        ]
        ends = (step.finished_slots.tobytes(), step.preempted_slots.tobytes())
        return (Entry.PLAN, step.step_id, slots, counts, computed, new, *blocks, *ends)

    def result(self, output: ModelRunnerOutput) -> tuple[Any, ...]:
        counts = output.num_sampled.tobytes()
        rows = len(counts) // 4
        given = None if counts == self._some_ones(len(counts)) else counts
        return (Entry.RESULT, output.step_id, rows, output.sampled_token_ids.tobytes(), given)

    def _some_ones(self, length_bytes: int) -> bytes:
        if len(self._ones) != length_bytes:
            self._ones = np.ones(length_bytes // 4, np.int32).tobytes()
        return self._ones
