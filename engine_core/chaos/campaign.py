"""One engine, its traffic, and a plan of faults: committed one after the other, each checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine_core.async_client import AsyncEngineClient
from engine_core.chaos import rubbish
from engine_core.chaos.faults import BY_NAME, KINDS, Effect, Fault, FaultKind, plan
from engine_core.chaos.leftovers import Mark
from engine_core.chaos.report import Report, Spread
from engine_core.chaos.traffic import Traffic, generated, recorded
from engine_core.client_session import RequestOutput
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError, UtilityError
from engine_core.lobby_protocol import default_address
from engine_core.replay.traces import TraceRequest
from executor.sampling_params import SamplingParams
from executor.spawning import module_command, module_environment
from transport.clock import SYSTEM_CLOCK, Clock
from transport.state_page import StatePage

NOTICE_LIMIT_S = 30.0  # from a fault in a rank until the ranks are up again
DEATH_LIMIT_S = 5.0  # from the engine's death until its clients know
LEFTOVER_LIMIT_S = 5.0
START_TIMEOUT_S = 5.0  # a phase
EXECUTE_TIMEOUT_S = 1.5
_STOPPED_S = (0.05, 0.5)  # a process that is stopped and goes on
_RUBBISH_MESSAGES = 20
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    seed: int
    num_ranks: int = 2
    concurrency: int = 48
    step_ms: float = 1.0
    trace: Sequence[TraceRequest] | None = None  # None: generated requests
    kinds: Sequence[FaultKind] = KINDS
    engine_log: Path | None = None  # where the engine's standard error goes; None: to ours


class Campaign:
    """`async with Campaign(settings) as campaign`, `run` any number of times, then `finish`."""

    def __init__(self, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self._clock = clock
        self._address = default_address()
        self._stack = AsyncExitStack()
        self._client: AsyncEngineClient
        self._traffic: Traffic
        self._mark: Mark
        self._bystander: subprocess.Popen[bytes] | None = None
        self._num_bystanders = 0
        self._committed: Counter[str] = Counter()
        self._recovery_s: list[float] = []
        self._worst_pause_s = 0.0
        self._engine_death_told_s: float | None = None
        self._leftovers: list[str] = []
        self._violations: list[str] = []
        self._after: set[asyncio.Task[None]] = set()  # of faults that overlap
        self._began_s = 0.0

    async def __aenter__(self) -> Campaign:
        await self._stack.__aenter__()
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _open(self) -> None:
        settings = self._settings
        self._began_s = self._clock.monotonic()
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        usual = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = directory
        self._stack.callback(_restore_tmpdir, usual)
        self._mark = Mark(Path(directory))
        self._stack.callback(self._mark.remove)
        with _stderr_to(settings.engine_log):
            self._client = await AsyncEngineClient.launch(
                engine_config(settings), lobby=self._address, log_level="WARNING"
            )
        self._stack.push_async_callback(self._client.close)
        self._page = self._stack.enter_context(StatePage.open(self._client.engine_pid))
        self._stack.callback(self._end_bystander)
        vocab_size = self._client.info.vocab_size or 0
        source = (
            generated(random.Random(settings.seed), vocab_size)
            if settings.trace is None
            else recorded(settings.trace, vocab_size)
        )
        self._traffic = Traffic(self._client, source, settings.concurrency, vocab_size, clock=self._clock)

    async def run(self, seed: int, num_faults: int, num_requests: int) -> None:
        """A round: that many faults and at least that many requests. Raises EngineDeadError if the engine
        dies of it.
        """
        rng = random.Random(seed)
        traffic = self._traffic
        enough = traffic.tally.sent + num_requests
        traffic.start()
        if self._bystander is None:
            await self._start_bystander()
        for fault in plan(rng, num_faults, self._settings.num_ranks, self._settings.kinds):
            await asyncio.sleep(fault.delay_s)
            self._check()
            self._committed[fault.kind.name] += 1
            over = self._commit(fault, rng)
            if fault.overlaps:
                task = asyncio.ensure_future(over)
                self._after.add(task)
            else:
                await over
                await self._await_overlapping()
        await self._await_overlapping()
        while traffic.tally.sent < enough:
            self._check()
            await asyncio.sleep(_POLL_S)
        await traffic.stop()
        self._check()

    @property
    def engine_pid(self) -> int:
        return self._client.engine_pid

    @property
    def num_requests(self) -> int:
        """Sent so far."""
        return self._traffic.tally.sent

    async def finish(self) -> Report:
        """Kill the engine, look at what is left, and sum up."""
        await self._kill_engine()
        await self._look_for_leftovers()
        tally = self._traffic.tally
        return Report(
            seed=self._settings.seed,
            faults=dict(self._committed),
            restarts=self._restarts(),
            requests=tally.sent,
            completed=tally.completed,
            aborted=tally.aborted,
            convicted=tally.convicted,
            lost=tally.lost,
            mismatched_tokens=tally.wrong_tokens,
            tokens=tally.tokens,
            recovery_s=Spread.of(self._recovery_s),
            worst_pause_s=round(self._worst_pause_s, 3),
            engine_death_told_s=self._engine_death_told_s,
            leftovers=self._leftovers,
            violations=[*self._violations, *tally.complaints],
            wall_s=round(self._clock.monotonic() - self._began_s, 3),
        )

    # Committing

    async def _commit(self, fault: Fault, rng: random.Random) -> None:
        """Returns when the fault is over: its effect is gone, and what it should have done is checked."""
        name = fault.kind.name
        if name == "abort":
            await self._traffic.abort_one(rng)
        elif name == "kill_client":
            await self._kill_bystander()
        elif name == "stop_client":
            if self._bystander is not None:
                await self._stop_for_a_while(self._bystander.pid, rng)
        elif name == "rubbish":
            await asyncio.to_thread(
                rubbish.send_to_engine, self._address, rng.randrange(1 << 30), _RUBBISH_MESSAGES
            )
            await asyncio.to_thread(rubbish.send_to_lobby, self._address, rng.randrange(1 << 30))
        elif name == "stop_rank":
            await self._stop_for_a_while(await self._rank(fault.rank), rng)
        elif name == "slow":
            await self._inject("slow", fault.rank, seconds=rng.uniform(*_STOPPED_S))
        else:
            await self._break_ranks(fault)

    async def _break_ranks(self, fault: Fault) -> None:
        assert fault.kind.effect is Effect.RESTART
        name, traffic = fault.kind.name, self._traffic
        before = self._restarts()
        window = traffic.open_window()
        begun = self._clock.monotonic()
        if name == "kill_rank":
            _signal(await self._rank(fault.rank), signal.SIGKILL)
        elif name == "freeze_rank":
            _signal(await self._rank(fault.rank), signal.SIGSTOP)
        elif name == "poison":
            await traffic.poison(f"poison-{self._committed['poison']}")
        else:
            await self._inject(name, fault.rank)
        if await self._await_restart(before, name):
            await traffic.probe()
            self._recovery_s.append(self._clock.monotonic() - begun)
        self._worst_pause_s = max(self._worst_pause_s, traffic.close_window(window))

    async def _await_restart(self, before: int, name: str) -> bool:
        deadline = self._clock.monotonic() + NOTICE_LIMIT_S
        while self._restarts() == before:
            self._check()
            if self._clock.monotonic() > deadline:
                self._violations.append(f"no ranks came up within {NOTICE_LIMIT_S:g} s after {name}")
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _inject(self, kind: str, rank: int, **conditions: float) -> None:
        deadline = self._clock.monotonic() + NOTICE_LIMIT_S
        while True:
            try:
                await self._client.collective_rpc("inject", args=[{"kind": kind, "rank": rank, **conditions}])
                return
            except UtilityError:  # the ranks are being restarted, or were while they answered
                if self._clock.monotonic() > deadline:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _stop_for_a_while(self, pid: int, rng: random.Random) -> None:
        _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(*_STOPPED_S))
        _signal(pid, signal.SIGCONT)

    async def _rank(self, rank: int) -> int:
        """The pid of a rank that there is now."""
        while True:
            for pid, command in self._mark.processes().items():
                words = command.split()
                if "executor.worker_proc" in words:
                    at = words.index("executor.worker_proc")
                    if words[at + 1 : at + 2] == [str(rank)]:
                        return pid
            self._check()
            await asyncio.sleep(_POLL_S)

    async def _await_overlapping(self) -> None:
        while self._after:
            await self._after.pop()

    # The other client

    async def _start_bystander(self) -> None:
        self._num_bystanders += 1
        seed = self._settings.seed + self._num_bystanders
        self._bystander = subprocess.Popen(
            module_command("engine_core.chaos.bystander", self._address, seed),
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._bystander.stdout is not None
        await asyncio.to_thread(self._bystander.stdout.readline)  # it runs, or has ended

    async def _kill_bystander(self) -> None:
        self._check_bystander()
        self._end_bystander()
        await self._start_bystander()

    def _check_bystander(self) -> None:
        """It must live, or have been killed."""
        bystander = self._bystander
        if bystander is None or bystander.poll() in (None, -signal.SIGKILL):
            return
        assert bystander.stderr is not None
        words = bystander.stderr.read().decode(errors="replace").strip().splitlines()
        said = words[-1] if words else "nothing"
        self._violations.append(f"another client ended with status {bystander.returncode}; it said: {said}")

    def _end_bystander(self) -> None:
        bystander, self._bystander = self._bystander, None
        if bystander is None:
            return
        bystander.kill()
        bystander.wait()
        for stream in (bystander.stdout, bystander.stderr):
            if stream is not None:
                stream.close()

    # The end

    async def _kill_engine(self) -> None:
        """SIGKILL, with requests in flight: each must hear of it."""
        pid = self._client.engine_pid
        streams = [self._client.generate([1, 2, 3], SamplingParams(max_tokens=1 << 16)) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        begun = self._clock.monotonic()
        os.kill(pid, signal.SIGKILL)

        waiters = [asyncio.ensure_future(_read(stream)) for stream in streams]
        done, pending = await asyncio.wait(waiters, timeout=DEATH_LIMIT_S)
        self._engine_death_told_s = round(self._clock.monotonic() - begun, 3)
        for task in pending:
            task.cancel()
        told = [task for task in done if isinstance(task.exception(), EngineDeadError)]
        if len(told) < len(waiters):
            self._violations.append(
                f"{len(waiters) - len(told)} of {len(waiters)} requests were not told within "
                f"{DEATH_LIMIT_S:g} s that the engine is dead"
            )

    async def _look_for_leftovers(self) -> None:
        bystander = self._bystander
        deadline = self._clock.monotonic() + LEFTOVER_LIMIT_S
        while True:
            if bystander is not None:
                bystander.poll()  # so that it does not stay a zombie
            self._leftovers = self._mark.leftovers()
            if not self._leftovers or self._clock.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        if bystander is not None and bystander.returncode not in (None, 0):
            self._check_bystander()

    # Helpers

    def _check(self) -> None:
        """Raise what has ended the traffic, if anything has."""
        if self._traffic.error is not None:
            raise self._traffic.error

    def _restarts(self) -> int:
        return int(self._page.snapshot()["engine"]["restarts"])


def engine_config(settings: Settings) -> EngineConfig:
    """An engine that can be broken, with deadlines short enough to wait for."""
    return EngineConfig(
        worker_cls="executor.faulty_worker:FaultyWorker",
        worker_options={
            "faults": [{"kind": "raise", "request": "poison-"}],
            "mock_step_ms": settings.step_ms,
            "mock_num_blocks": 4000,
            "mock_max_model_len": 1 << 17,
        },
        tensor_parallel_size=settings.num_ranks,
        distributed_executor_backend="mp",
        start_timeout_s=START_TIMEOUT_S,
        execute_timeout_s=EXECUTE_TIMEOUT_S,
        max_worker_restarts=1_000_000,
        log_stats=False,
        stop_grace_s=2.0,
    )


def kinds_named(names: Sequence[str]) -> list[FaultKind]:
    """Raises ValueError for a name that there is not."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"there is no fault {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]


async def _read(stream: AsyncIterator[RequestOutput]) -> None:
    async for _ in stream:
        pass


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended for another reason
        os.kill(pid, number)


def _restore_tmpdir(value: str | None) -> None:
    if value is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = value


@contextlib.contextmanager
def _stderr_to(path: Path | None) -> Iterator[None]:
    """Processes started meanwhile write their standard error there."""
    if path is None:
        yield
        return
    ours = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
