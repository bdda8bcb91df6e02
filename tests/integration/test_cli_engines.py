"""The command line against engines of its own and running ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_core.replay.prefix import unbounded_prefix_hits
from engine_core.replay.traces import load_trace
from executor.mock_model import mock_tokens
from tests.conftest import RunCli
from tests.engines import children_of, wait_until

SLICE = Path(__file__).parents[1] / "data" / "traces" / "mooncake_conversation_200.jsonl"
CLI = [sys.executable, "-m", "engine_core.cli"]


def _tokens(prompt: list[int], n: int) -> list[int]:
    tokens: list[int] = mock_tokens(prompt, n).tolist()
    return tokens


@contextlib.contextmanager
def _started(*args: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that is killed at the end if it still runs."""
    process = subprocess.Popen(
        [*CLI, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def address() -> Iterator[str]:
    """A running engine's."""
    with _started("serve", "-tp", "2") as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in logs


# generate


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_files_in_the_current_directory_shadow_no_module(
    backend: str, run_cli: RunCli, tmp_path: Path
) -> None:
    for package in ("executor", "transport", "engine_core"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong one')\n")
    script = Path(sys.executable).with_name("engine-core")
    command = [
        str(script),
        "generate",
        "11",
        "22",
        "--max-tokens",
        "3",
        "--distributed-executor-backend",
        backend,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(t) for t in _tokens([11, 22], 3)]


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_what_a_worker_prints_is_no_output(backend: str, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(
        "from executor.mock_worker import MockWorker\n"
        "class Talkative(MockWorker):\n"
        "    def load_model(self):\n"
        "        print('loading')\n"
        "        return super().load_model()\n"
    )
    args = ("--worker-cls", "talkative:Talkative", "--distributed-executor-backend", backend)
    done = run_cli("generate", 11, 22, "--max-tokens", 3, *args, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split() == [str(t) for t in _tokens([11, 22], 3)]
    assert [line for line in done.stderr.splitlines() if line.endswith("loading")]


def test_generate_prints_the_ids(run_cli: RunCli) -> None:
    result = run_cli("generate", 11, 22, 33, "--max-tokens", 7)
    assert result.stdout.split() == [str(token) for token in _tokens([11, 22, 33], 7)]
    assert result.returncode == 0 and result.stderr == ""


def test_generate_takes_prompts_by_line_and_connects(run_cli: RunCli, address: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("1 2\n\n[3, 4]\n5,6\n")
    result = run_cli(
        *("generate", "--connect", address, "--prompt-file", tmp_path / "prompts", "--json", "--logprobs", 1)
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    prompts = [[1, 2], [3, 4], [5, 6]]
    assert [line["token_ids"] for line in lines] == [_tokens(prompt, 16) for prompt in prompts]
    assert {line["finish_reason"] for line in lines} == {"length"}
    assert all(len(line["logprobs"]) == 16 and line["logprobs"][0]["rank"] == 1 for line in lines)
    piped = run_cli("generate", "--connect", address, input="1 2\n3 4\n")
    assert piped.stdout.splitlines() == [" ".join(map(str, _tokens(prompt, 16))) for prompt in prompts[:2]]


def test_generate_stops_at_a_stop_token(run_cli: RunCli) -> None:
    tokens = _tokens([8, 9], 16)
    result = run_cli("generate", 8, 9, "--json", "--stop-token-ids", tokens[3])
    answer = json.loads(result.stdout)
    assert (answer["token_ids"], answer["finish_reason"], answer["stop_reason"]) == (
        tokens[:4],
        "stop",
        tokens[3],
    )


def test_a_refused_prompt_fails_alone(run_cli: RunCli) -> None:
    result = run_cli("generate", "--log-level", "error", "--max-tokens", 2, input="1\n99999\n2\n")
    right = [" ".join(map(str, _tokens([first], 2))) for first in (1, 2)]
    assert (result.returncode, result.stdout.splitlines()) == (1, [right[0], "", right[1]])
    assert result.stderr.startswith("engine-core generate: prompt 2: ") and "99999" in result.stderr
    assert result.stderr.count("\n") == 1


def test_generate_ends_quietly_when_nobody_reads(tmp_path: Path) -> None:
    command = f"{' '.join(CLI)} generate 1 2 --max-tokens 100000 | head -c 20 > {tmp_path / 'out'}"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=50
    )
    assert result.stderr == "" and result.returncode == 128 + signal.SIGPIPE
    assert (tmp_path / "out").stat().st_size == 20


# serve


def test_serve_says_where_and_ends_quietly_by_ctrl_c() -> None:
    with _started("serve", "--log-level", "warning") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ipc://@engine-core-")
        process.send_signal(signal.SIGINT)
        out, logs = process.communicate(timeout=20)
        assert (process.returncode, out, logs) == (130, "", "")


def test_serve_listens_where_it_is_told(run_cli: RunCli, tmp_path: Path) -> None:
    with _started("serve", "--listen", f"ipc://{tmp_path}/engine") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"ipc://{tmp_path}/engine\n"
        answer = run_cli("generate", 5, "--max-tokens", 1, "--connect", f"ipc://{tmp_path}/engine")
        assert answer.stdout.split() == [str(_tokens([5], 1)[0])]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert not (tmp_path / "engine").exists()


def _serve_fails(run_cli: RunCli, *args: object, **kwargs: object) -> str:
    result = run_cli("serve", "--log-level", "error", *args, **kwargs)
    assert result.stdout == "" and result.returncode == 1, result
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1
    return str(result.stderr)


def test_a_port_in_use_is_named(run_cli: RunCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in _serve_fails(run_cli, "--listen", f"tcp://127.0.0.1:{port}")


def test_a_file_that_is_no_socket_is_left_alone(run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("kept")
    assert "no socket" in _serve_fails(run_cli, "--listen", f"ipc://{path}")
    assert path.read_text() == "kept"


def test_a_worker_class_that_does_not_exist_is_named(run_cli: RunCli) -> None:
    assert "no_such_module" in _serve_fails(run_cli, "--worker-cls", "no_such_module:Worker")
    assert "NoSuchWorker" in _serve_fails(run_cli, "--worker-cls", "executor.mock_worker:NoSuchWorker")


def test_an_option_that_the_worker_does_not_know_is_named(run_cli: RunCli) -> None:
    assert "frobnicate" in _serve_fails(run_cli, "--worker-option", "frobnicate=1")


def test_a_worker_that_fails_to_start_is_one_line_for_the_launcher(run_cli: RunCli) -> None:
    result = run_cli("generate", 1, "--worker-cls", "no_such_module:Worker")
    assert result.returncode == 1 and result.stdout == ""
    assert "no_such_module" in result.stderr and result.stderr.count("\n") == 1
    result = run_cli("generate", 1, "--worker-cls", "no_such_module:Worker", "--debug")
    assert "Traceback" in result.stderr and "resolve_worker_cls" in result.stderr


def _descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *_descendants(child))]


@pytest.mark.parametrize("command", [("generate", "1"), ("serve",)])
def test_an_interrupt_while_the_workers_start_is_quiet(command: tuple[str, ...]) -> None:
    slow = ("-tp", "2", "--worker-cls", "tests.slow_start_worker:SlowStartWorker")
    with _started(*command, *slow) as process:
        wait_until(lambda: len(_descendants(process.pid)) >= 2, "a worker")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_closed_standard_streams_do_no_harm(closed: str, tmp_path: Path) -> None:
    redirections = " ".join(f"{fd}>&-" for fd in closed.split())
    script = f'"{sys.executable}" -m engine_core.cli generate 1 2 -tp 2 --max-tokens 3 {redirections}'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stderr) == (0, "")
    if "1" not in closed:
        assert result.stdout.split() == [str(token) for token in _tokens([1, 2], 3)]


def test_an_address_without_an_engine_is_named(run_cli: RunCli) -> None:
    result = run_cli("generate", 1, "--connect", "ipc://@engine-core-nowhere")
    assert result.returncode == 1 and result.stdout == ""
    assert "ipc://@engine-core-nowhere" in result.stderr and result.stderr.count("\n") == 1


def test_an_address_where_somebody_else_listens_is_named(run_cli: RunCli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        closing = threading.Thread(target=lambda: other.accept()[0].close())
        closing.start()
        result = run_cli("generate", 1, "--connect", address)
        closing.join()
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert f"{address} cannot be joined" in result.stderr and "did not start" not in result.stderr


def test_a_temporary_directory_may_have_a_long_name(run_cli: RunCli, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    result = run_cli("generate", 1, env={**os.environ, "TMPDIR": str(long)})
    assert result.returncode == 0, result.stderr
    assert list(long.iterdir()) == []


def test_the_traceback_is_there_for_who_debugs(run_cli: RunCli) -> None:
    result = run_cli("serve", "--worker-cls", "no_such_module:Worker", "--debug")
    assert result.returncode == 1 and "Traceback" in result.stderr


# replay


def test_replay_checks_every_token_and_counts_what_an_unbounded_cache_gives(run_cli: RunCli) -> None:
    result = run_cli("replay", SLICE, "--max-requests", 60, "--speed", 50, "-tp", 2, "--json")
    report = json.loads(result.stdout)
    requests = load_trace(SLICE, 60)
    assert result.returncode == 0
    assert (report["requests"], report["completed"], report["failed"]) == (60, 60, 0)
    assert report["mismatched_tokens"] == 0
    assert report["output_tokens"] == sum(request.output_length for request in requests)
    assert report["prompt_tokens"] == sum(request.input_length for request in requests)
    assert report["prefix_hit_tokens"] == sum(unbounded_prefix_hits(requests, 16)) > 0
    assert report["preemptions"] == 0 and report["engine_steps"] > 0
    for latency in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 <= report[latency]["p50"] <= report[latency]["p90"] <= report[latency]["p99"]


def test_replay_counts_preemptions_of_a_small_cache(run_cli: RunCli) -> None:
    result = run_cli(
        *("replay", SLICE, "--max-requests", 40, "--speed", 1000, "--num-gpu-blocks-override", 5600, "--json")
    )
    report = json.loads(result.stdout)
    assert (report["completed"], report["mismatched_tokens"]) == (40, 0)
    assert report["preemptions"] > 0


def test_replay_on_a_running_engine_as_a_table(run_cli: RunCli, address: str) -> None:
    args = ("replay", SLICE, "--max-requests", 20, "--speed", 100, "--connect", address)
    result = run_cli(*args)
    assert result.returncode == 0 and "mismatched tokens  0" in result.stdout
    again = json.loads(run_cli(*args, "--json", "--max-concurrency", 2).stdout)
    assert again["completed"] == 20 and again["prefix_hit_tokens"] > again["prompt_tokens"] * 0.9


def test_replay_fails_if_a_request_does(run_cli: RunCli) -> None:
    result = run_cli("replay", SLICE, "--max-requests", 5, "--speed", 100, "--max-model-len", 6000)
    assert result.returncode == 1
    assert "failed             " in result.stdout and "validation_error" in result.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_prints_what_there_is(signum: int) -> None:
    with _started("replay", str(SLICE), "--speed", "1", "--json") as process:
        assert process.stderr is not None
        while "requests done" not in process.stderr.readline():
            pass
        process.send_signal(signum)
        out, err = process.communicate(timeout=20)
    report = json.loads(out)
    assert process.returncode == 130 and "Traceback" not in err
    assert report["failed"] == 0 and report["mismatched_tokens"] == 0
    assert report["completed"] + report["unfinished"] == 200 and report["output_tokens"] > 0


def test_replay_reports_a_dead_engine_with_what_there_is() -> None:
    with _started("serve", "--mock-step-ms", "5") as engine:
        assert engine.stdout is not None
        address = engine.stdout.readline().strip()
        with _started("replay", str(SLICE), "--json", "--connect", address) as process:
            assert process.stderr is not None
            while "requests done" not in process.stderr.readline():
                pass
            os.kill(engine.pid, signal.SIGKILL)
            out, err = process.communicate(timeout=20)
    report = json.loads(out)
    assert process.returncode == 1
    assert (
        report["mismatched_tokens"] == 0
        and report["completed"] + report["failed"] + report["unfinished"] == 200
    )
    assert "the engine is dead" in err and "Traceback" not in err


def test_a_group_of_engines_ends_together() -> None:
    """Without a front end to answer, engines wait for one; a signal reaches each."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with _started("serve", "-dp", "2", "-dpp", str(port)) as process:
            assert process.stderr is not None
            lines = [process.stderr.readline() for _ in range(2)]
            assert all("dials" in line for line in lines)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
            assert process.returncode == 128 + signal.SIGTERM
