"""What an engine and its ranks say about themselves in the state page, field by field.

To add a field, declare it: readers learn of it from the page. Monotonic times are the host's
(`Clock.monotonic`), so that a reader can tell their age.
"""

from __future__ import annotations

from transport.processes import ProcessIdentity, own_identity
from transport.shared_row import Choice, Count, Real, Row, Text

CACHE_STATES = ("NORMAL", "UPDATING", "CLEARING", "CLEARED", "FAILED")


class ProcessRow(Row):
    """The row of one process, written by one thread of it, but for the atomic fields."""

    pid = Count()
    start_ticks = Count("clock ticks since boot", "tells the process from a later one with the same pid")
    heartbeat_s = Real("s monotonic", "a thread kept for it ran in the process", atomic=True)

    __slots__ = ()

    def claim(self) -> None:
        """Makes the row this process's own, before any other write; clears what an earlier owner left."""
        self.write(_store_claim, own_identity())


def _store_claim(row: ProcessRow, owner: ProcessIdentity) -> None:
    row.clear()
    ProcessRow.pid.store(row, owner.pid)
    ProcessRow.start_ticks.store(row, owner.start_ticks)


class EngineRow(ProcessRow):
    """The row of the engine process, written by its main loop."""

    awake_since_s = Real(
        "s monotonic", "when the main loop last got work; 0 while it waits for some", atomic=True
    )

    phase = Choice(
        "starting",
        "starting workers",
        "connecting",
        "ready",
        "restarting workers",
        "draining",
        "shutting down",
        "stopped",
        "failed",
    )
    started_at_s = Real("s unix")
    version = Text(32)
    model = Text(256)
    address = Text(128, "where clients connect")
    max_num_seqs = Count("requests")
    max_num_batched_tokens = Count("tokens")
    max_model_len = Count("tokens")
    block_size = Count("tokens")
    num_blocks = Count("blocks", "in the pool, the null block included")
    restarts = Count("restarts", "of the group of ranks")
    pause = Choice("running", "no new requests", "frozen", about="of the scheduler")
    sleep_level = Count()
    weight_version = Text(64)
    weight_status = Choice(*CACHE_STATES)
    kv_status = Choice(*CACHE_STATES)
    first_error = Text(512)

    step_id = Count("", "of the last step scheduled")
    last_progress_s = Real("s monotonic", "when the main loop last planned a step or took in a result")
    in_flight = Count("steps", "handed to the ranks and not yet answered")
    running = Count("requests")
    waiting = Count("requests", "for capacity")
    deferred = Count("requests", "waiting for something other than capacity")
    requests_admitted = Count("requests", "accepted since the start")
    requests_finished = Count("requests", "since the start, for whatever reason")
    blocks_free = Count("blocks", "cached ones that nobody holds included")
    blocks_used = Count("blocks", "held by requests")
    blocks_cached = Count("blocks", "that a prefix can hit")
    prefix_requests = Count("requests", "looked up in the prefix cache since the start")
    prefix_queries = Count("tokens", "of those")
    prefix_hits = Count("tokens", "found")
    prompt_tokens = Count("tokens", "of prompts computed since the start, cached ones included")
    cached_tokens = Count("tokens", "of those that came from the prefix cache")
    generation_tokens = Count("tokens", "sampled since the start")
    preemptions = Count("preemptions", "since the start")

    __slots__ = ()

    def progress(
        self,
        step_id: int,
        last_progress_s: float,
        in_flight: int,
        running: int,
        waiting: int,
        deferred: int,
        requests_admitted: int,
        requests_finished: int,
        blocks_free: int,
        blocks_used: int,
        blocks_cached: int,
        prefix_requests: int,
        prefix_queries: int,
        prefix_hits: int,
        prompt_tokens: int,
        cached_tokens: int,
        generation_tokens: int,
        preemptions: int,
    ) -> None:
        """What changes with a step, as one write of about a microsecond."""
        fields = _PROGRESS.pack(
            step_id,
            last_progress_s,
            in_flight,
            running,
            waiting,
            deferred,
            requests_admitted,
            requests_finished,
            blocks_free,
            blocks_used,
            blocks_cached,
            prefix_requests,
            prefix_queries,
            prefix_hits,
            prompt_tokens,
            cached_tokens,
            generation_tokens,
            preemptions,
        )
        self.write(_store_progress, fields)


_PROGRESS, _PROGRESS_AT = EngineRow.block("step_id", "preemptions")


def _store_progress(row: EngineRow, fields: bytes) -> None:
    row.memory[_PROGRESS_AT] = fields


class RankRow(ProcessRow):
    """The row of one worker rank, written by the thread that serves its calls."""

    # What the executor goes by; atomic, so that it can be read when the rank has died in mid-write.
    taken = Count("", "number of the last message that it began with", atomic=True)
    done = Count("", "number of the last message that it has done, its answer sent", atomic=True)
    waits_for = Count("", "1 + the rank that it waits for in a collective; 0 while it does not", atomic=True)

    error = Text(256)
    method = Text(64, "the call that it runs, or ran last")
    phase = Choice(
        "not started",
        "starting",
        "initializing device",
        "loading model",
        "initializing cache",
        "waiting",
        "running",
        "shutting down",
        "failed",
        about="waiting: for the next call; running: the call in `method`",
    )
    since_s = Real("s monotonic", "when it entered the phase, or began the call")
    step_id = Count("", "of the last step begun")
    steps = Count("steps", "done")
    last_step_s = Real("s", "duration of the last step done")

    __slots__ = ("_in_step", "_last_step", "_method", "_since", "_step", "_steps", "_taken")

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._method = ""
        self._step = self._steps = self._taken = 0
        self._since = self._last_step = 0.0
        self._in_step = False

    def enter(self, phase: str, now_s: float) -> None:
        """The rank enters `phase`."""
        self._since = now_s
        self.write(_store_call, RankRow.phase.choices.index(phase), self._method)

    def begin(self, number: int, method: str, now_s: float) -> None:
        """The rank begins with message `number`, a call."""
        self.taken = self._taken = number
        self._since = now_s
        self._in_step = False
        self.write(_store_call, _RUNNING, method)

    def begin_step(self, number: int, step_id: int, now_s: float) -> None:
        """The rank begins with message `number`, a step."""
        self.taken = self._taken = number
        self._since = now_s
        self._step = step_id
        self._in_step = True
        self.write(_store_call, _RUNNING, STEP_METHOD)

    def end(self, now_s: float) -> None:
        """The rank has done, and answered, what it began; it waits for the next message."""
        if self._in_step:
            self._last_step = now_s - self._since
            self._steps += 1
        self._since = now_s
        self.write(_store_call, _WAITING, self._method)
        self.done = self._taken


STEP_METHOD = "execute_model"
_RUNNING = RankRow.phase.choices.index("running")
_WAITING = RankRow.phase.choices.index("waiting")
_CALL, _CALL_AT = RankRow.block("phase", "last_step_s")


def _store_call(row: RankRow, phase: int, method: str) -> None:
    if method != row._method:
        RankRow.method.store(row, method)
        row._method = method
    row.memory[_CALL_AT] = _CALL.pack(phase, row._since, row._step, row._steps, row._last_step)
