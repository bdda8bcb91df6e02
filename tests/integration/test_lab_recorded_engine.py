"""What a real engine decided replays identically, also after it was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine_core.client import EngineClient
from engine_core.errors import EngineDeadError
from engine_core.lab.decision_replay import DecisionReplay
from engine_core.lab.record import RecordError, RecordReader
from executor.sampling_params import SamplingParams
from tests.conftest import RunCli
from tests.engines import children_of, expected, is_running, mock_config, prompt


def _serve(path: Path, *, kill: bool = False) -> int:
    """Requests on an engine whose KV cache is too small for all, some aborted; returns how many."""
    config = mock_config(
        num_blocks=40, max_num_seqs=16, tensor_parallel_size=2, step_ms=2.0, record=str(path)
    )
    with EngineClient.launch(config) as client:
        shared = prompt(1, 64)
        ids = [
            client.add_request(
                (shared if index % 2 else []) + prompt(index, 20 + 5 * index), SamplingParams(max_tokens=60)
            )
            for index in range(20)
        ]
        client.utility("get_supported_tasks")
        client.abort(ids[3:6])
        if kill:
            written = path.stat().st_size
            while client.num_live and path.stat().st_size < written + 5_000:
                client.outputs()
            os.kill(client.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                while True:
                    client.outputs()
            return len(ids)
        client.utility("pause_scheduler", "keep", False)
        client.utility("resume_scheduler")
        while client.num_live:
            client.outputs()
        assert client.utility("reset_prefix_cache") is True
        assert list(client.generate(prompt(99, 30), SamplingParams(max_tokens=5)))
    return len(ids) + 1


def test_a_served_record_replays_identically(tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "engine.rec"
    count = _serve(path)
    done = run_cli("replay-decisions", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} requests" in done.stdout and "all decisions are identical" in done.stdout
    assert " 0 preemptions" not in done.stdout and " 3 ended from outside" in done.stdout
    assert "1 cache resets" in done.stdout

    done = run_cli("replay-decisions", path, "--until", 20, "--shell", input="print(scheduler.check())\n")
    assert done.returncode == 0
    assert "up to step 20" in done.stdout and "[]" in done.stdout


def test_the_record_of_a_killed_engine_lacks_its_last_moment_at_most(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    _serve(path, kill=True)
    reader = RecordReader(path)
    replay = DecisionReplay(reader.header)
    try:
        replay.run(reader.entries())
    except RecordError as error:
        assert "truncated" in str(error)
    assert replay.progress.requests == 20 and replay.progress.steps > 5
    assert not replay.scheduler.check()


def test_what_cannot_be_replayed_is_one_line(tmp_path: Path, run_cli: RunCli) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(os.urandom(500))
    done = run_cli("replay-decisions", foreign)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no record of an engine's decisions" in done.stderr and done.stderr.count("\n") == 1
    assert run_cli("replay-decisions", tmp_path / "nothing").returncode == 1


def test_an_engine_that_cannot_record_does_not_start(tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("serve", "--record", tmp_path / "no" / "such" / "directory")
    assert done.returncode == 1
    assert "record" in done.stderr and "No such file" in done.stderr


def test_a_record_with_a_restart_of_the_workers_replays_identically(tmp_path: Path) -> None:
    path = tmp_path / "engine.rec"
    config = mock_config(
        num_blocks=40, max_num_seqs=16, tensor_parallel_size=2, step_ms=5.0, record=str(path)
    )
    with EngineClient.launch(config) as client:
        prompts = {
            client.add_request(tokens, SamplingParams(max_tokens=60)): tokens
            for tokens in (prompt(index, 20 + 5 * index) for index in range(12))
        }
        got: dict[str, list[int]] = {request_id: [] for request_id in prompts}
        killed = False
        while client.num_live:
            for output in client.outputs():
                got[output.request_id] += output.new_token_ids
            if not killed and sum(map(len, got.values())) > 100:
                killed = True
                (rank, *_) = [pid for pid in children_of(client.engine_pid) if is_running(pid)]
                os.kill(rank, signal.SIGKILL)
        for request_id, tokens in prompts.items():
            assert got[request_id] == expected(tokens, 60)
    reader = RecordReader(path)
    replay = DecisionReplay(reader.header)
    replay.run(reader.entries())
    assert replay.progress.restarts == 1 and replay.progress.preemptions
    assert not replay.scheduler.requests and not replay.scheduler.check()
