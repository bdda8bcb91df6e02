"""A record of decisions replays to the same decisions, or says what is wrong with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.errors import RequestError
from engine_core.lab import recorder as recorder_module
from engine_core.lab import snapshot
from engine_core.lab.decision_replay import DecisionReplay, Difference, GapError
from engine_core.lab.latency import parse_latency
from engine_core.lab.record import Entry, Header, RecordError, RecordReader, RecordWriter
from engine_core.lab.recorder import DecisionRecorder
from engine_core.lab.simulated_workers import SimulatedWorkers
from engine_core.lab.virtual_clock import VirtualClock
from engine_core.request import Request
from engine_core.scheduler.scheduler import PauseState
from executor.base import EngineCapacity
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest

CAPACITY = EngineCapacity(60, 1000, 400, "float32")


def make_header(config: EngineConfig) -> Header:
    return Header(engine_version="1", started=0.0, config=config, capacity=CAPACITY)


class Session:
    """An engine whose decisions are recorded, and a random life for it."""

    def __init__(self, path: Path, config: EngineConfig, seed: int = 0, **parts: int) -> None:
        self.rng = np.random.default_rng(seed)
        clock = VirtualClock()
        workers = SimulatedWorkers(config.executor_config(), CAPACITY, parse_latency("step_ms=1"), clock)
        self.recorder = DecisionRecorder(str(path), make_header(config), **parts)
        self.core = EngineCore(config, workers, clock, make_observer=lambda _: self.recorder)
        self.count = 0
        self.refused = 0

    def arrive(self, **options: Any) -> None:
        rng = self.rng
        prefix = np.arange(16 * int(rng.integers(0, 8)), dtype=np.int32)
        own = rng.integers(0, 1000, int(rng.integers(1, 80)), dtype=np.int32)
        # One in ten has the id of a live request.
        duplicate = bool(self.core.scheduler.requests) and rng.random() < 0.1
        name = next(iter(self.core.scheduler.requests)) if duplicate else f"r{self.count}"
        self.count += 1
        request = Request(
            name,
            np.concatenate((prefix, own)),
            SamplingParams(max_tokens=int(rng.integers(1, 60)), stop_token_ids=[7]),
            client_index=int(rng.integers(0, 3)),
            priority=int(rng.integers(0, 3)),
            arrival_time=float(self.count),
            cache_salt="salt" if rng.random() < 0.2 else None,
            block_hasher=self.core.scheduler.hasher,
            **options,
        )
        try:
            self.core.add_request(request)
        except RequestError:
            self.refused += 1

    def live(self, turns: int) -> None:
        core, rng = self.core, self.rng
        for _ in range(turns):
            for _ in range(int(rng.poisson(0.5))):
                self.arrive()
            if core.scheduler.requests and rng.random() < 0.03:
                core.abort_requests([str(rng.choice(list(core.scheduler.requests))), "nobody"])
            if rng.random() < 0.01:
                core.reset_prefix_cache(reset_running=bool(rng.integers(0, 2)))
            if rng.random() < 0.01:
                core.batch_queue.clear()  # as after a failure of the workers
                core.scheduler.restart()
                core.scheduler.allow_only(list(core.scheduler.requests)[::2])
            if rng.random() < 0.1:
                core.scheduler.allow_only(None)
            if rng.random() < 0.02:
                core.scheduler.set_limits(int(rng.integers(1, 9)), int(rng.integers(8, 97)))
            if rng.random() < 0.02:
                core.scheduler.set_limits(int(rng.integers(1, 9)), int(rng.integers(16, 65)))
            core.scheduler.set_pause_state(
                PauseState.PAUSED_NEW if rng.random() < 0.05 else PauseState.UNPAUSED
            )
            core.step_fn()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        core.scheduler.allow_only(None)
        while core.has_work:
            core.step_fn()

    def close(self) -> None:
        self.recorder.close()


def replay(path: Path) -> DecisionReplay:
    reader = RecordReader(path)
    done = DecisionReplay(reader.header)
    done.run(reader.entries())
    reader.close()
    return done


def recorded(path: Path, turns: int = 300, seed: int = 0, **fields: Any) -> Session:
    session = Session(path, EngineConfig(max_num_seqs=8, max_num_batched_tokens=96, **fields), seed)
    session.live(turns)
    session.close()
    return session


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_a_life_with_preemptions_aborts_resets_and_restarts_replays_identically(
    tmp_path: Path, async_scheduling: bool, scheduling_policy: str
) -> None:
    preemptions = restarts = resets = 0
    for seed in range(3):
        path = tmp_path / f"{seed}.rec"
        session = recorded(
            path, seed=seed, async_scheduling=async_scheduling, scheduling_policy=scheduling_policy
        )
        done = replay(path)
        steps = session.core.scheduler._step_id
        assert done.progress.steps == done.step.step_id == steps  # type: ignore[union-attr]
        assert done.progress.refused == session.refused > 0
        assert done.progress.requests + session.refused == session.count
        assert done.progress.finished
        preemptions += done.progress.preemptions
        restarts += done.progress.restarts
        resets += done.progress.resets
        assert not done.scheduler.check() and not done.scheduler.requests
        assert done.scheduler.kv.pool._by_hash.keys() == session.core.scheduler.kv.pool._by_hash.keys()
    assert preemptions and restarts and resets


def test_the_way_of_planning_makes_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    recorded(path)
    reader = RecordReader(path)
    done = DecisionReplay(reader.header)
    done.scheduler.by_columns = False
    done.run(reader.entries())
    assert done.progress.steps > 300


def test_a_replay_can_stop_at_a_step_and_show_its_state(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    recorded(path)
    reader = RecordReader(path)
    done = DecisionReplay(reader.header)
    done.run(reader.entries(), until=100)
    assert done.step is not None and done.step.step_id == 100
    assert done.scheduler.requests and not done.scheduler.check()


def _rewritten(path: Path, change: Callable[[list[list[Any]]], object]) -> Path:
    reader = RecordReader(path)
    entries = list(reader.entries())
    change(entries)
    changed = path.with_suffix(".changed")
    writer = RecordWriter(str(changed), reader.header)
    writer.write(entries)
    writer.close()
    return changed


def _with_other_tokens(entries: list[list[Any]]) -> None:
    entry = next(e for e in entries[200:] if e[0] == Entry.RESULT and e[2] and e[4] is None)
    entry[3] = np.full(len(entry[3]) // 4, 7, np.int32).tobytes()  # the stop token: all rows end


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("num_scheduled_tokens", lambda es: _change_plan(es, 3)),
        ("slots", lambda es: _change_plan(es, 2)),
        ("new_requests", lambda es: _change_new_request(es)),
        ("", _with_other_tokens),
        ("the refusal", lambda es: es.remove(next(e for e in es if e[0] == Entry.REFUSED))),
        ("its number", lambda es: es.remove(next(e for e in es[50:] if e[0] in (Entry.PLAN, Entry.SAME)))),
    ],
)
def test_the_first_difference_is_shown_with_both_sides(
    tmp_path: Path, what: str, change: Callable[[list[list[Any]]], object]
) -> None:
    path = tmp_path / "a.rec"
    recorded(path)
    with pytest.raises(Difference) as difference:
        replay(_rewritten(path, change))
    assert what in difference.value.what
    text = str(difference.value)
    assert "recorded: " in text and "replayed: " in text
    assert difference.value.recorded != difference.value.replayed


def _change_plan(entries: list[list[Any]], field: int) -> None:
    entry = next(e for e in entries[50:] if e[0] == Entry.PLAN and e[2])
    array = np.frombuffer(entry[field], np.int32).copy()
    array[-1] += 1
    entry[field] = array.tobytes()


def _change_new_request(entries: list[list[Any]]) -> None:
    entry = next(e for e in entries if e[0] == Entry.PLAN and e[5])
    entry[5][0][2] += 16


def test_a_truncated_record_is_good_up_to_its_end_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    recorded(path)
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) // 2, len(data) // 2 + 5):
        path.write_bytes(data[:length])
        with pytest.raises(RecordError, match="truncated"):
            replay(path)
    whole = RecordReader(path)
    done = DecisionReplay(whole.header)
    with pytest.raises(RecordError):
        done.run(whole.entries())


def test_a_damaged_record_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    recorded(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"damaged|truncated"):
        replay(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"engine-core decisions 1\n", b"x" * 5000])
def test_a_foreign_file_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"no record|ends before"):
        RecordReader(path)


def test_when_the_disk_is_slow_the_loop_goes_on_and_the_record_tells_of_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = RecordWriter.write

    def slow_write(self: RecordWriter, payload: object) -> None:
        if isinstance(payload, list):
            may_write.wait()
        write(self, payload)

    monkeypatch.setattr(RecordWriter, "write", slow_write)
    monkeypatch.setattr(recorder_module, "MOST_PENDING", 50)
    path = tmp_path / "a.rec"
    session = Session(path, EngineConfig(max_num_seqs=8, max_num_batched_tokens=96))
    session.live(200)
    may_write.set()
    while session.recorder._pending:
        threading.Event().wait(0.01)
    monkeypatch.undo()
    session.live(20)
    session.close()
    with pytest.raises(GapError, match="gap of"):
        replay(tmp_path / "a.rec.1")
    assert replay(path).step.step_id == session.core.scheduler._step_id  # type: ignore[union-attr]


def test_when_the_disk_is_full_the_engine_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(tmp_path / "a.rec", EngineConfig(max_num_seqs=8, max_num_batched_tokens=96))
    session.recorder._writer._file.close()
    session.recorder._writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    session.live(50)
    session.close()
    assert sum("Recording" in line and "No space" in line for line in caplog.messages) == 1


def test_everything_that_a_request_brings_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=96, enable_lora=True, max_loras=1, max_num_queued_reqs=20
    )
    session = Session(path, config)
    for index in range(30):
        session.arrive(lora=LoRARequest(f"a{index % 3}", 1 + index % 3, "/a"))
    session.live(40)
    session.close()
    assert session.refused
    assert replay(path).progress.refused == session.refused


def test_every_file_of_a_record_can_be_replayed_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=96, prefill_schedule_interval=3)
    session = Session(path, config, part_bytes=20_000, num_parts=4)
    for _ in range(6):
        session.live(80)
        for _ in range(20):
            session.arrive()
        while session.recorder._pending:  # let the file grow
            threading.Event().wait(0.01)
    session.live(50)
    session.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.rec", "a.rec.1", "a.rec.2", "a.rec.3"]
    parts = [replay(tmp_path / name) for name in ("a.rec.3", "a.rec.2", "a.rec.1", "a.rec")]
    assert all(part.progress.steps > 10 for part in parts)
    last = [part.step.step_id for part in parts if part.step is not None]
    assert last == sorted(last) and last[-1] == session.core.scheduler._step_id
    assert RecordReader(path).header.part >= 3
    now, then = session.core.scheduler, parts[-1].scheduler
    assert now.kv.pool._by_hash == then.kv.pool._by_hash and now.kv.pool._cached == then.kv.pool._cached


def test_a_record_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    for seed in range(3):
        Session(path, EngineConfig(), seed, num_parts=2).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.rec", "a.rec.1"]
    assert replay(path).progress.steps == replay(tmp_path / "a.rec.1").progress.steps == 0


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("letter", "letter.2"):
        path = tmp_path / name
        path.write_text("Dear engine,")
        with pytest.raises(FileExistsError, match="no record"):
            Session(tmp_path / "letter", EngineConfig())
        assert path.read_text() == "Dear engine,"
        path.unlink()
    Session(Path("/dev/null"), EngineConfig()).close()
    assert Path("/dev/null").is_char_device()


def test_a_snapshot_is_the_whole_state(tmp_path: Path) -> None:
    session = Session(tmp_path / "a.rec", EngineConfig(max_num_seqs=8, scheduling_policy="priority"))
    session.live(60)
    for _ in range(25):
        session.arrive()
        session.core.step_fn()
    state = snapshot.take(session.core.scheduler)
    data = msgspec.msgpack.encode(state)
    session.core.step_fn()  # shares nothing with it
    assert msgspec.msgpack.encode(state) == data
    fresh = DecisionReplay(make_header(session.core.config)).scheduler
    snapshot.restore(fresh, msgspec.msgpack.decode(data))
    session.close()
    assert not fresh.check() and len(fresh.requests) > 8
    again = snapshot.take(fresh)
    assert again[3:] == state[3:]  # type: ignore[index]  # but for the class's name


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "builtins:eval", "engine_core.request:np.load"]
)
def test_a_snapshot_can_neither_name_foreign_classes_nor_run_code(tmp_path: Path, name: str) -> None:
    session = Session(tmp_path / "a.rec", EngineConfig(max_num_seqs=8))
    session.arrive()
    data = msgspec.msgpack.encode(snapshot.take(session.core.scheduler))
    session.close()
    own = b"engine_core.request:Request"
    forged = data.replace(msgspec.msgpack.encode(own.decode()), msgspec.msgpack.encode(name))
    assert forged != data
    with pytest.raises(snapshot.SnapshotError):
        snapshot.restore(
            DecisionReplay(make_header(session.core.config)).scheduler, msgspec.msgpack.decode(forged)
        )
