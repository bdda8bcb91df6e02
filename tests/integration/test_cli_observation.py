"""ps, top, health, doctor and ctl, on engines that serve, hang and have died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_core.cli import main
from engine_core.client import EngineClient
from engine_core.config import EngineConfig
from executor.sampling_params import SamplingParams
from tests.conftest import RunCli
from tests.engines import expected, mock_config, prompt, wait_until
from transport.state_page import StatePage

pytest.importorskip("rich")


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCli:
    """As the one for all tests, but without a process for each command, which would take most of the time."""
    monkeypatch.setattr("engine_core.cli.configure", lambda level: None)  # logging stays pytest's

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        return subprocess.CompletedProcess(args, status, *capsys.readouterr())

    return run


def launch(name: str, step_ms: float = 2, **fields: Any) -> EngineClient:
    config: EngineConfig = mock_config(tensor_parallel_size=2, step_ms=step_ms, **fields)
    return EngineClient.launch(config, lobby=f"ipc://@engine-core-test-{os.getpid()}-{name}")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with launch("observed", max_num_seqs=16) as client:
        yield client


def snapshot(pid: int) -> dict[str, Any]:
    with StatePage.open(pid) as page:
        return page.snapshot()


def text(done: subprocess.CompletedProcess[str], status: int = 0) -> str:
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_ps_lists_the_engine(engine: EngineClient, run_cli: RunCli) -> None:
    lines = text(run_cli("ps")).splitlines()
    assert lines[0].split()[:3] == ["PID", "PHASE", "UP"]
    (line,) = [line for line in lines if line.split()[0] == str(engine.engine_pid)]
    assert line.split()[1] == "ready" and "engine-core-test" in line
    pages = [json.loads(line) for line in text(run_cli("ps", "--json")).splitlines()]
    assert engine.engine_pid in [page["engine"]["pid"] for page in pages]


def test_top_shows_load_and_ranks(engine: EngineClient, run_cli: RunCli) -> None:
    request_id = engine.add_request(prompt(1, 300), SamplingParams(max_tokens=3000))
    engine.outputs()
    picture = text(run_cli("top", engine.engine_pid, "--once", "--interval", 0.3))
    engine.abort(request_id)
    assert f"engine {engine.engine_pid} ready" in picture
    assert "running 1 of 16" in picture
    for rank in range(2):
        assert any(line.split()[1:2] == [str(rank)] for line in picture.splitlines())
    assert "tokens/s" in picture and "prefix hits" in picture


def test_probes_say_yes_with_a_sentence(engine: EngineClient, run_cli: RunCli) -> None:
    answers = text(run_cli("health", engine.engine_pid)).splitlines()
    assert [answer.split(":")[:2] for answer in answers] == [
        ["live", " yes"],
        ["ready", " yes"],
        ["progress", " yes"],
    ]


def test_a_paused_engine_is_alive_and_not_ready(engine: EngineClient, run_cli: RunCli) -> None:
    assert run_cli("ctl", "--pid", engine.engine_pid, "pause", "--mode", "keep").returncode == 0
    assert "paused" in text(run_cli("health", "--ready", engine.engine_pid), 1)
    assert text(run_cli("health", "--live", engine.engine_pid))
    assert "paused (frozen)" in text(run_cli("top", engine.engine_pid, "--once", "--interval", 0.05))
    assert text(run_cli("ctl", "--pid", engine.engine_pid, "is-paused")) == "true\n"
    assert run_cli("ctl", "--pid", engine.engine_pid, "resume").returncode == 0
    assert text(run_cli("health", "--ready", engine.engine_pid))


def test_ctl_changes_limits_calls_workers_and_names_what_is_refused(
    engine: EngineClient, run_cli: RunCli
) -> None:
    pid = engine.engine_pid
    limits = json.loads(text(run_cli("ctl", "--pid", pid, "set", "--max-num-seqs", 4)))
    assert limits == {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    assert snapshot(pid)["engine"]["max_num_seqs"] == 4
    assert json.loads(text(run_cli("ctl", "--pid", pid, "rpc", "barrier", "here"))) == ["here", "here"]
    refused = run_cli("ctl", "--pid", pid, "set", "--max-num-seqs", 17)
    assert refused.returncode == 1 and "is not from 1 to 16" in refused.stderr
    assert run_cli("ctl", "--pid", pid, "sleep", 1).returncode == 1
    assert json.loads(text(run_cli("ctl", "--pid", pid, "set", "--max-num-seqs", 16)))["max_num_seqs"] == 16


def test_doctor_finds_nothing_wrong_with_a_healthy_engine(engine: EngineClient, run_cli: RunCli) -> None:
    findings = text(run_cli("doctor", engine.engine_pid)).splitlines()
    assert {finding.split()[0] for finding in findings} <= {"ok", "odd"}
    host = run_cli("doctor").stdout  # other engines of this host may be ill
    assert "Linux" in host and "/dev/shm" in host and "a process may open" in host


def test_a_stuck_rank_is_named_by_all(run_cli: RunCli, tmp_path: Path) -> None:
    with launch("stuck", step_ms=100) as client:
        request_id = client.add_request(prompt(1, 20), SamplingParams(max_tokens=2000))
        client.outputs()
        pid, rank = client.engine_pid, snapshot(client.engine_pid)["ranks"][0]["pid"]
        wait_until(lambda: snapshot(pid)["ranks"][0]["phase"] == "running", "rank 0 is in a step")
        os.kill(rank, signal.SIGSTOP)
        try:
            wait_until(lambda: snapshot(pid)["ranks"][1]["phase"] == "waiting", "rank 1 waits")
            ask = ("health", "--progress", pid, "--stall-limit-s", 0.3)
            wait_until(lambda: run_cli(*ask).returncode == 1, "the stall is noticed")
            health = text(run_cli(*ask), 1)
            assert "are with the ranks and nothing came back" in health
            assert f"rank 0 (pid {rank}) is stopped while in execute_model for" in health
            assert "rank 1" not in health
            svg = tmp_path / "top.svg"
            picture = text(run_cli("top", pid, "--once", "--interval", 0.1, "--svg", svg))
            (line,) = [line for line in picture.splitlines() if str(rank) in line]
            assert "stopped while in execute_model of step" in line
            assert svg.read_text().startswith("<svg")
            assert f"kill -CONT {rank}" in text(run_cli("doctor", pid), 1)
            # A copy of the page tells the same when everything is gone.
            with StatePage.open(pid) as page:
                (tmp_path / "page").write_bytes(page.image())
        finally:
            os.kill(rank, signal.SIGCONT)
        client.abort(request_id)
    assert "has ended" in text(run_cli("health", "--live", tmp_path / "page"), 1)
    assert f"engine {pid} dead" in text(run_cli("top", tmp_path / "page", "--once", "--interval", 0.05))


def test_an_engine_that_went_on_after_a_restart_tells_the_first_cause(run_cli: RunCli) -> None:
    with launch("restarted") as client:
        tokens = prompt(2, 20)
        request_id = client.add_request(tokens, SamplingParams(max_tokens=300))
        received = [token for output in client.outputs() for token in output.new_token_ids]
        os.kill(snapshot(client.engine_pid)["ranks"][1]["pid"], signal.SIGKILL)
        while client.num_live:
            received += [token for output in client.outputs(5.0) for token in output.new_token_ids]
        assert received == expected(tokens, 300), request_id
        engine = snapshot(client.engine_pid)["engine"]
        assert engine["restarts"] == 1 and "SIGKILL" in engine["first_error"]
        assert engine["phase"] == "ready"
        findings = text(run_cli("doctor", client.engine_pid))
        assert "restarted 1 time(s)" in findings and "SIGKILL" in findings


def test_without_an_engine_it_is_said_in_one_line(run_cli: RunCli) -> None:
    for command in ("health", "top --once"):
        done = run_cli(*command.split(), 999_999_999)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1 and "999999999" in done.stderr
