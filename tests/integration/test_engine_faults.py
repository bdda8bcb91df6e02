"""What clients see and what is left when a process of an engine, or a client of it, dies or misbehaves."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from engine_core.client import EngineClient
from engine_core.errors import EngineDeadError, EngineStartError
from engine_core.lobby_protocol import Ended, Greeting, Join, MessageReader, frame, stream_socket
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

LONG = SamplingParams(max_tokens=4000)


def lobby_name(request: pytest.FixtureRequest) -> str:
    return f"ipc://@engine-core-test-{os.getpid()}-{request.node.name[:60]}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_engine_is_told_to_every_waiter_and_leaves_nothing(ranks: int) -> None:
    with EngineClient.launch(mock_config(tensor_parallel_size=ranks, step_ms=2)) as client:
        family = [client.engine_pid, *children_of(client.engine_pid)]
        assert len(family) == (1 if ranks == 1 else 1 + ranks)
        stream = client.generate(prompt(1, 10), LONG)
        next(stream)
        client.add_request(prompt(2, 10), LONG)
        os.kill(client.engine_pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=rf"pid {client.engine_pid}\) was killed by SIGKILL"):
            while True:
                next(stream)
        assert time.monotonic() - begin < 3
        attempts = (lambda: client.add_request([1]), client.outputs, lambda: client.utility("is_sleeping"))
        for attempt in attempts:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                attempt()
        wait_until(lambda: not any(map(is_running, family)), "the end of engine and ranks", 5)


def test_kill_worker_tells_the_first_cause(request: pytest.FixtureRequest) -> None:
    address = lobby_name(request)
    config = mock_config(tensor_parallel_size=2, step_ms=2, on_worker_failure="fail")
    with EngineClient.launch(config, lobby=address) as client, EngineClient.connect(address) as other:
        other.add_request(prompt(3, 10), LONG)
        stream = client.generate(prompt(1, 10), LONG)
        next(stream)
        victim = children_of(client.engine_pid)[0]
        os.kill(victim, signal.SIGKILL)
        for attempt in (lambda: list(stream), lambda: [other.outputs() for _ in iter(int, 1)]):
            with pytest.raises(EngineDeadError, match=rf"pid {victim}\) was killed by SIGKILL") as caught:
                attempt()
            assert "execute_model" in caught.value.cause


def test_kill_idle_worker_is_noticed_without_a_request() -> None:
    config = mock_config(tensor_parallel_size=2, on_worker_failure="fail")
    with EngineClient.launch(config) as client:
        victim = children_of(client.engine_pid)[1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not is_running(client.engine_pid), "the engine's end")
        with pytest.raises(EngineDeadError, match=rf"pid {victim}\) was killed by SIGKILL"):
            client.utility("is_sleeping")


VANISHING_CLIENT = """
import sys
from engine_core.client import EngineClient
from executor.sampling_params import SamplingParams
client = EngineClient.connect(sys.argv[1])
for i in range(20):
    client.add_request([i, 1, 2], SamplingParams(max_tokens=4000))
client.outputs()
print("running", flush=True)
while True:
    client.outputs()
"""


def test_kill_client_aborts_its_requests_and_disturbs_nobody(request: pytest.FixtureRequest) -> None:
    address = lobby_name(request)
    with EngineClient.launch(mock_config(step_ms=1), lobby=address) as client:
        command = [sys.executable, "-c", VANISHING_CLIENT, address]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "running\n"
            tokens = prompt(1, 10)
            stream = client.generate(tokens, SamplingParams(max_tokens=500))
            seen = next(stream).new_token_ids
            other.kill()
        for output in stream:
            seen += output.new_token_ids
        assert seen == expected(tokens, 500)
        assert client.stats is not None and client.stats.num_running_reqs <= 1
        assert client.utility("reset_prefix_cache") is True


def test_closing_a_client_aborts_its_requests(request: pytest.FixtureRequest) -> None:
    address = lobby_name(request)
    with EngineClient.launch(mock_config(), lobby=address) as client:
        with EngineClient.connect(address) as other:
            other.add_request([1, 2, 3], LONG)
            other.outputs()
        wait_until(lambda: bool(client.utility("reset_prefix_cache")), "the end of the other's request")


def test_engine_ends_when_its_launcher_is_killed() -> None:
    code = (
        "from engine_core.client import EngineClient; from tests.engines import mock_config; import time\n"
        "client = EngineClient.launch(mock_config(tensor_parallel_size=2))\n"
        "print(client.engine_pid, flush=True); time.sleep(100)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        engine = int(launcher.stdout.readline())
        family = [engine, *children_of(engine)]
        launcher.kill()
    wait_until(lambda: not any(map(is_running, family)), "the end of engine and ranks", 5)


def test_engine_ends_when_its_launcher_is_killed_while_it_starts() -> None:
    code = (
        "from engine_core.client import EngineClient; from tests.engines import mock_config\n"
        "config = mock_config(worker_cls='tests.slow_start_worker:SlowStartWorker', tensor_parallel_size=2)\n"
        "EngineClient.launch(config)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as launcher:
        wait_until(lambda: bool(children_of(launcher.pid)), "the engine's process")
        (engine,) = children_of(launcher.pid)
        wait_until(lambda: len(children_of(engine)) == 2, "the ranks")
        family = [engine, *children_of(engine)]
        launcher.kill()
    wait_until(lambda: not any(map(is_running, family)), "the end of engine and ranks", 10)


def test_orderly_stop_is_told_as_such() -> None:
    with EngineClient.launch(mock_config(step_ms=2)) as client:
        client.add_request(prompt(1, 10), LONG)
        client.outputs()
        os.kill(client.engine_pid, signal.SIGTERM)
        reasons = set()
        while client.num_live:
            reasons |= {output.finish_reason for output in client.outputs()}
        with pytest.raises(EngineDeadError, match="stopped"):
            client.utility("is_sleeping")
        assert reasons == {None, "abort"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"worker_cls": "no.such.module:Worker"}, "no.such.module"),
        ({"worker_cls": "executor.mock_worker:NoSuchWorker"}, "NoSuchWorker"),
        ({"worker_cls": "no.such.module:Worker", "tensor_parallel_size": 2}, "no.such.module"),
        ({"worker_options": {"mock_nonsense": 1}}, "mock_nonsense"),
        ({"num_blocks": 1}, "num_gpu_blocks_override"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
    ],
)
def test_start_failure_tells_the_first_error(config: dict[str, object], message: str) -> None:
    options = config.pop("worker_options", None)
    made = mock_config(**config)
    if options is not None:
        made = msgspec.structs.replace(made, worker_options=options)
    with pytest.raises(EngineStartError, match=message):
        EngineClient.launch(made)


def test_lobby_address_in_use_is_a_start_failure(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    address = lobby_name(request)
    with EngineClient.launch(mock_config(), lobby=address), pytest.raises(EngineStartError, match="in use"):
        EngineClient.launch(mock_config(), lobby=address)


def test_lobby_file_of_a_killed_engine_does_not_block_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lobby"
    for _ in range(2):
        with engine_process(mock_config(), lobby=f"ipc://{path}") as process:
            assert process.stdout is not None and process.stdout.readline().startswith("serving")
            with EngineClient.connect(f"ipc://{path}") as client:
                assert client.utility("is_sleeping") is False
            process.kill()
            process.wait()
        assert path.exists()
    with engine_process(mock_config(), lobby=f"ipc://{path}") as process:
        assert process.stdout is not None and process.stdout.readline().startswith("serving")
    assert not path.exists()


def test_engine_out_of_descriptors_serves_on_and_lets_in_later(request: pytest.FixtureRequest) -> None:
    address = lobby_name(request)
    with engine_process(mock_config(), lobby=address) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("serving")
        with EngineClient.connect(address) as client:
            highest = max(int(name) for name in os.listdir(f"/proc/{process.pid}/fd"))
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
            streams = []
            for _ in range(20):
                stream, target = stream_socket(address)
                stream.connect(target)
                streams.append(stream)
            time.sleep(1.5)
            tokens = prompt(1, 10)
            outputs = list(client.generate(tokens, SamplingParams(max_tokens=5)))
            assert [token for o in outputs for token in o.new_token_ids] == expected(tokens, 5)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
            for stream in streams:
                stream.close()
            with EngineClient.connect(address) as late:
                assert late.utility("is_sleeping") is False
        process.terminate()
        warnings = process.stderr.read().count("Too many open files")
    assert 1 <= warnings < 20  # not as fast as it can


def test_lobby_over_tcp() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    with EngineClient.launch(mock_config(), lobby=address), EngineClient.connect(address) as client:
        tokens = prompt(1, 10)
        outputs = list(client.generate(tokens, SamplingParams(max_tokens=5)))
        assert [o.new_token_ids[0] for o in outputs] == expected(tokens, 5)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ipc://@engine-core-nobody-here", "no engine at"),
        ("tcp://127.0.0.1:1", "no engine at"),
        ("ipc:///" + "x" * 200, "107 bytes"),
        ("udp://nowhere", "not an address"),
    ],
)
def test_connecting_to_nobody_says_so(address: str, message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        EngineClient.connect(address)


def test_temporary_directory_may_have_a_long_name(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 110)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    address = lobby_name(request)
    with EngineClient.launch(mock_config(), lobby=address), EngineClient.connect(address) as client:
        list(client.generate([1, 2], SamplingParams(max_tokens=2)))
    assert list(deep.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_other_users_cannot_connect_to_a_clients_sockets(request: pytest.FixtureRequest) -> None:
    with EngineClient.launch(mock_config(step_ms=1)) as client:
        address = client._connection.outputs.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        assert address.startswith("ipc://@")
        pid = os.fork()
        if pid == 0:
            os.setgid(65534)
            os.setuid(65534)
            stranger = zmq.Context().socket(zmq.PUSH)
            stranger.connect(address)
            stranger.send(b"rubbish")
            time.sleep(0.3)
            os._exit(0)
        tokens = prompt(1, 10)
        seen = [
            t
            for output in client.generate(tokens, SamplingParams(max_tokens=300))
            for t in output.new_token_ids
        ]
        os.waitpid(pid, 0)
        assert seen == expected(tokens, 300)
        assert client._connection.outputs.poll(0) == 0


def test_strangers_in_the_lobby_harm_nobody(request: pytest.FixtureRequest) -> None:
    address = lobby_name(request)
    with EngineClient.launch(mock_config(step_ms=1), lobby=address) as client:
        stream = client.generate(prompt(1, 10), SamplingParams(max_tokens=100))
        seen = next(stream).new_token_ids
        silent, target = stream_socket(address)
        silent.connect(target)
        for data in (
            b"\x00\x00\x00\x04abcd",
            b"\xff\xff\xff\xff",
            frame(Join(input="inproc://x", output="ipc://y", name="n")),
            frame(Join(input="ipc://nowhere", output="bogus", name="n")),
            frame(Ended("me")),
        ):
            stranger, target = stream_socket(address)
            stranger.settimeout(5)
            stranger.connect(target)
            stranger.sendall(data)
            reader, messages = MessageReader(), []
            while received := stranger.recv(1 << 16):
                messages += reader.feed(received)
            stranger.close()
            assert [type(message) for message in messages] == [Greeting, Ended]
        seen += [token for output in stream for token in output.new_token_ids]
        assert seen == expected(prompt(1, 10), 100)
        silent.close()


def test_idle_engine_uses_no_cpu() -> None:
    with EngineClient.launch(mock_config(tensor_parallel_size=2)) as client:
        list(client.generate([1, 2], SamplingParams(max_tokens=5)))

        def ticks() -> int:
            fields = Path(f"/proc/{client.engine_pid}/stat").read_text().rpartition(") ")[2].split()
            return int(fields[11]) + int(fields[12])

        time.sleep(0.3)
        before = ticks()
        time.sleep(1.0)
        assert ticks() - before <= 2, "hundredths of a second in one second"


def test_client_may_be_used_from_another_thread_than_it_was_opened_in() -> None:
    opened: list[EngineClient] = []
    thread = threading.Thread(target=lambda: opened.append(EngineClient.launch(mock_config())))
    thread.start()
    thread.join()
    with opened[0] as client:
        assert client.utility("is_sleeping") is False
