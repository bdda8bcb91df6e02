"""A rank that fails, in any way and at any moment, costs the clients a pause and nothing else.

The cells of docs/failures.md's table for ranks. One engine serves them all, one after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_core.client import EngineClient
from engine_core.config import EngineConfig
from engine_core.errors import EngineDeadError, EngineStartError, RequestError, UtilityError
from engine_core.lobby_protocol import default_address
from executor.sampling_params import SamplingParams
from tests.engines import (
    ROOT,
    children_of,
    engine_process,
    expected,
    is_running,
    mock_config,
    prompt,
    wait_until,
)

POISON = 31_999
TIMEOUT_S = 0.5


def config_with(*faults: dict[str, Any], **fields: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "worker_cls": "executor.faulty_worker:FaultyWorker",
        "step_ms": 2,
        "max_num_batched_tokens": 256,
        "execute_timeout_s": TIMEOUT_S,
        "max_worker_restarts": 1000,
    }
    made = mock_config(**{**defaults, **fields})
    options = {**made.worker_options, "faults": list(faults)}
    return msgspec.structs.replace(made, worker_options=options, stop_grace_s=1.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with EngineClient.launch(config_with()) as client:
        yield client


@pytest.fixture(scope="module")
def sync_engine() -> Iterator[EngineClient]:
    with EngineClient.launch(config_with(async_scheduling=False)) as client:
        yield client


def ranks_of(client: EngineClient) -> list[int]:
    """Pids, by rank."""
    ranks = {}
    for pid in children_of(client.engine_pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"executor.worker_proc" in words:
            ranks[int(words[words.index(b"executor.worker_proc") + 1])] = pid
    return [pid for _, pid in sorted(ranks.items())]


class Load:
    """Requests of one client, and whether they get what they should."""

    def __init__(self, client: EngineClient, prompts: list[list[int]], length: int) -> None:
        self.client = client
        self.length = length
        params = SamplingParams(max_tokens=length)
        self.prompts = {client.add_request(tokens, params): tokens for tokens in prompts}
        self.got: dict[str, list[int]] = {request_id: [] for request_id in self.prompts}

    def read(self, until: int = 0) -> None:
        """Until all have `until` tokens; 0: until all have ended, and as they should."""
        while self.client.num_live and not (until and min(map(len, self.got.values())) >= until):
            outputs = self.client.outputs(timeout_s=15)
            assert outputs, "nothing comes"
            for output in outputs:
                self.got[output.request_id] += output.new_token_ids
                assert output.finish_reason in (None, "length"), output
        if not until:
            for request_id, tokens in self.prompts.items():
                assert self.got[request_id] == expected(tokens, self.length)
            await_ranks(self.client)
            assert self.client.utility("reset_prefix_cache") is True


def await_ranks(client: EngineClient) -> None:
    """Until all ranks work. One that answers no steps may have failed without harm to any request."""

    def work() -> bool:
        try:
            client.collective_rpc("check_health", timeout_s=TIMEOUT_S)
        except UtilityError:
            return False
        return True

    wait_until(work, "health of all ranks")


def strike(client: EngineClient, kind: str, rank: int) -> None:
    if kind == "SIGKILL":
        os.kill(ranks_of(client)[rank], signal.SIGKILL)
    elif kind == "SIGSTOP":
        os.kill(ranks_of(client)[rank], signal.SIGSTOP)
    else:
        client.collective_rpc("inject", args=[{"kind": kind, "rank": rank}])


KINDS = ["SIGKILL", "SIGSTOP", "raise", "hang", "exit", "segfault", "garbage"]


@pytest.mark.parametrize("kind", KINDS)
def test_rank_fails_in_decode_with_two_steps_in_flight(engine: EngineClient, kind: str) -> None:
    load = Load(engine, [prompt(i, 20 + i) for i in range(8)], 60)
    load.read(until=5)
    strike(engine, kind, rank=0)
    load.read()


@pytest.mark.parametrize("kind", ["SIGKILL", "raise"])
def test_rank_fails_in_decode_with_one_step_in_flight(sync_engine: EngineClient, kind: str) -> None:
    load = Load(sync_engine, [prompt(i, 20 + i) for i in range(8)], 60)
    load.read(until=5)
    strike(sync_engine, kind, rank=1)
    load.read()


@pytest.mark.parametrize("kind", KINDS)
def test_rank_fails_in_prefill(engine: EngineClient, kind: str) -> None:
    load = Load(engine, [prompt(1, 20)], 60)
    load.read(until=5)
    more = [prompt(i, 3000) for i in range(2, 4)]  # a dozen steps each
    params = SamplingParams(max_tokens=load.length)
    for tokens in more:
        request_id = engine.add_request(tokens, params)
        load.prompts[request_id], load.got[request_id] = tokens, []
    strike(engine, kind, rank=1)
    load.read()


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_rank_fails_while_idle(engine: EngineClient, kind: str) -> None:
    before = ranks_of(engine)
    strike(engine, kind, rank=1)
    if kind == "SIGKILL":
        wait_until(
            lambda: len(ranks_of(engine)) == 2 and not set(before) & set(ranks_of(engine)), "new ranks"
        )
    load = Load(engine, [prompt(1, 20)], 10)
    load.read()
    assert not set(before) & set(ranks_of(engine))


@pytest.mark.parametrize("kind", ["exit", "segfault", "hang"])
def test_rank_fails_in_a_call_by_name(engine: EngineClient, kind: str) -> None:
    """Nobody knows whether such a call may be made again, so that is its caller's decision."""
    load = Load(engine, [prompt(i, 20) for i in range(3)], 200)
    load.read(until=5)
    engine.collective_rpc("inject", args=[{"kind": kind, "rank": 1, "at": "check_health"}])
    with pytest.raises(UtilityError, match=r"rank 1 \(pid \d+\).*check_health"):
        engine.collective_rpc("check_health", timeout_s=TIMEOUT_S)
    load.read()
    assert engine.collective_rpc("check_health", timeout_s=5) == [None, None]


def test_an_error_in_a_call_by_name_is_the_callers_alone(engine: EngineClient) -> None:
    before = ranks_of(engine)
    engine.collective_rpc("inject", args=[{"kind": "raise", "rank": 1, "at": "check_health"}])
    with pytest.raises(UtilityError, match="ordered to raise in check_health"):
        engine.collective_rpc("check_health")
    assert ranks_of(engine) == before


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_rank_is_killed_during_a_pause(engine: EngineClient, mode: str) -> None:
    load = Load(engine, [prompt(i, 20) for i in range(4)], 100)
    load.read(until=5)
    before = ranks_of(engine)
    answered = threading.Event()
    if mode == "keep":
        engine.utility("pause_scheduler", mode, False)
        answered.set()
    else:
        # Answered once what runs has ended, so the answer is for later.
        engine._connection.send(engine._session.call(_Ignored(answered), [mode, False]))
    os.kill(before[1], signal.SIGKILL)
    if mode == "keep":
        wait_until(lambda: len(ranks_of(engine)) == 2 and before[0] not in ranks_of(engine), "new ranks")
        assert engine.utility("is_scheduler_paused") is True
        engine.utility("resume_scheduler")
    load.read()
    # The pause is answered after the last output; any call takes in what has come.
    wait_until(
        lambda: engine.utility("is_scheduler_paused") is not None and answered.is_set(), "the pause's answer"
    )
    engine.utility("resume_scheduler")


class _Ignored:
    method = "pause_scheduler"

    def __init__(self, answered: threading.Event) -> None:
        self._answered = answered

    def answer(self, value: Any) -> None:
        self._answered.set()

    def fail(self, error: Exception) -> None:
        raise error


def test_rank_is_killed_again_while_it_is_restarted(engine: EngineClient) -> None:
    load = Load(engine, [prompt(i, 20) for i in range(4)], 100)
    load.read(until=5)
    for rank in (0, 1):
        before = set(ranks_of(engine))
        os.kill(ranks_of(engine)[rank], signal.SIGKILL)
        wait_until(lambda: bool(set(ranks_of(engine)) - before), "a new rank")  # noqa: B023
    load.read()


def test_requests_are_aborted_and_added_while_ranks_restart(engine: EngineClient) -> None:
    load = Load(engine, [prompt(i, 20) for i in range(4)], 100)
    load.read(until=5)
    os.kill(ranks_of(engine)[0], signal.SIGKILL)
    victim = next(iter(load.prompts))
    engine.abort(victim)
    del load.prompts[victim]
    late = prompt(9, 20)
    request_id = engine.add_request(late, SamplingParams(max_tokens=load.length))
    load.prompts[request_id], load.got[request_id] = late, []
    reasons = []
    while engine.num_live:
        for output in engine.outputs(timeout_s=10):
            load.got[output.request_id] += output.new_token_ids
            if output.request_id == victim:
                reasons.append(output.finish_reason)
    assert reasons[-1] == "abort"
    load.read()


@pytest.mark.parametrize(("kind", "rank"), [("raise", 0), ("raise", 1), ("hang", 0), ("segfault", 1)])
def test_a_poisonous_request_ends_alone(kind: str, rank: int) -> None:
    faults = {"kind": kind, "rank": rank, "token": POISON}
    with EngineClient.launch(config_with(faults)) as engine:
        load = Load(engine, [prompt(i, 20) for i in range(6)], 200)
        poisonous = engine.generate([1, 2, POISON, 3], SamplingParams(max_tokens=200))
        load.read()
        with pytest.raises(RequestError, match=rf"worker rank {rank} \(pid \d+\)") as caught:
            list(poisonous)
        assert caught.value.code == "worker_error"


def test_workers_that_keep_failing_end_the_engine_with_their_history() -> None:
    config = config_with(*({"kind": "exit", "at": "check_health"},), max_worker_restarts=2)
    with EngineClient.launch(config) as engine:
        for _ in range(2):
            with pytest.raises(UtilityError, match="exited with code 3"):
                engine.collective_rpc("check_health")
            list(engine.generate([1, 2], SamplingParams(max_tokens=2)))
        with pytest.raises((UtilityError, EngineDeadError)):
            engine.collective_rpc("check_health")
        with pytest.raises(EngineDeadError) as caught:
            list(engine.generate([1, 2], SamplingParams(max_tokens=2)))
        cause = caught.value.cause
        assert cause.startswith("worker rank 0 (pid ")
        assert "exited with code 3 in check_health" in cause.splitlines()[0]
        assert "ordered to exit in check_health" in cause  # from its standard error
        assert "not restarted more than 2 times within 300 s" in cause
        assert cause.count("s earlier: worker rank 0") == 2
        process = engine._connection.process
        assert process is not None and process.wait(10) == 1


@pytest.mark.parametrize(
    ("kind", "at", "phase"),
    [
        ("raise", "init_device", "init"),
        ("raise", "load_model", "load"),
        ("raise", "initialize_cache", "kv"),
        ("exit", "load_model", "load"),
        ("segfault", "initialize_cache", "kv"),
        ("kill", "init_device", "init"),
        ("hang", "load_model", "load"),
    ],
)
def test_rank_fails_at_the_start(kind: str, at: str, phase: str) -> None:
    config = config_with({"kind": kind, "at": at, "rank": 1}, start_timeout_s=3.0)
    with pytest.raises(EngineStartError, match=rf"worker rank 1 \(pid \d+\).*'{phase}'") as caught:
        EngineClient.launch(config)
    if kind == "hang":
        assert "faulty_worker.py" in caught.value.cause  # where it is stuck


@pytest.mark.parametrize("kind", ["raise", "hang", "exit", "kill"])
def test_rank_fails_at_the_stop(kind: str) -> None:
    config = config_with({"kind": kind, "at": "shutdown", "rank": 1})
    with EngineClient.launch(config) as engine:
        list(engine.generate([1, 2], SamplingParams(max_tokens=2)))
        family = [engine.engine_pid, *children_of(engine.engine_pid)]
        begin = time.monotonic()
    assert time.monotonic() - begin < 8
    assert not any(map(is_running, family))
    assert engine._connection.process is not None and engine._connection.process.returncode == 0


def test_rank_is_killed_while_the_engine_drains() -> None:
    config = config_with(shutdown_timeout=20.0)
    with engine_process(config, lobby=default_address()) as process:
        assert process.stdout is not None
        with EngineClient.connect(process.stdout.readline().split()[1]) as client:
            load = Load(client, [prompt(i, 20) for i in range(4)], 300)
            load.read(until=5)
            process.send_signal(signal.SIGTERM)
            os.kill(ranks_of(client)[1], signal.SIGKILL)
            while client.num_live:
                for output in client.outputs(timeout_s=15):
                    load.got[output.request_id] += output.new_token_ids
                    assert output.finish_reason in (None, "length")
        for request_id, tokens in load.prompts.items():
            assert load.got[request_id] == expected(tokens, 300)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_ranks_that_are_killed_with_their_engine_leave_nothing() -> None:
    with EngineClient.launch(config_with()) as engine:
        family = [*children_of(engine.engine_pid), engine.engine_pid]
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, family)), "the end of all", 5)


def test_ctrl_c_in_a_terminal_reaches_the_ranks_through_the_engine_only(tmp_path: Path) -> None:
    """The whole foreground group gets SIGINT: one orderly end, and no traceback of anybody."""
    command = [sys.executable, "-m", "engine_core.cli", "serve", "--tensor-parallel-size", "2"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("ipc://")
        family = [process.pid, *children_of(process.pid)]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=15)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any(map(is_running, family))


def test_engine_stops_although_nobody_reads_what_its_ranks_say() -> None:
    """The pipe is full, so whoever writes to it waits."""
    config = config_with(worker_cls="tests.chatty_worker:ChattyWorker")
    config = msgspec.structs.replace(config, worker_options={"mock_max_model_len": 4096})
    with engine_process(config, lobby=default_address()) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        with EngineClient.connect(address) as client:
            tokens = prompt(1, 10)
            stream = client.generate(tokens, SamplingParams(max_tokens=300))
            seen = [token for output in stream for token in output.new_token_ids]
            assert seen == expected(tokens, 300)
        family = [process.pid, *children_of(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 128 + signal.SIGTERM
        assert not any(map(is_running, family))
