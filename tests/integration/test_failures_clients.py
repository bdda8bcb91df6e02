"""What becomes of the others, and of the engine, when a client dies, stops, or does not read."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_core.client import AsyncEngineClient, EngineClient
from executor.sampling_params import SamplingParams
from tests.engines import ROOT, expected, mock_config, prompt, wait_until

LONG = 1500


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"ipc://@engine-core-test-{os.getpid()}-{request.node.name[:60]}"


READER = """
import sys
import threading
import time
from engine_core.client import AsyncEngineClient, EngineClient
from executor.sampling_params import SamplingParams
from tests.engines import expected, prompt
requests, length = int(sys.argv[2]), int(sys.argv[3])
client = EngineClient.connect(sys.argv[1])
got = {str(i): [] for i in range(requests)}
for i in range(requests):
    client.add_request(prompt(i, 10), SamplingParams(max_tokens=length), request_id=str(i))
messages, ends = 0, {}
while client.num_live:
    outputs = client.outputs()
    for output in outputs:
        got[output.request_id] += output.new_token_ids
        messages += 1
        if output.finished:
            ends[output.request_id] = output
    if messages == len(outputs):
        print("running", flush=True)
right = all(tokens == expected(prompt(int(i), 10), len(tokens)) for i, tokens in got.items())
codes = {output.error.code if output.error else output.finish_reason for output in ends.values()}
print("right" if right else "wrong", *sorted(codes), sum(map(len, got.values())), messages, flush=True)
"""


@contextmanager
def reader(address: str, requests: int, length: int) -> Iterator[subprocess.Popen[str]]:
    """A client that reads all that it gets, until somebody stops it."""
    command = [sys.executable, "-c", READER, address, str(requests), str(length)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "running\n"
            yield process
        finally:
            process.kill()


def test_a_client_that_does_not_read_gets_all_of_it_later_and_disturbs_nobody(address: str) -> None:
    config = mock_config(step_ms=0.2)
    with EngineClient.launch(config, lobby=address) as client, reader(address, 40, LONG) as slow:
        slow.send_signal(signal.SIGSTOP)
        tokens = prompt(100, 10)
        before = rss_mb(client.engine_pid)
        seen = [
            t
            for output in client.generate(tokens, SamplingParams(max_tokens=LONG))
            for t in output.new_token_ids
        ]
        assert seen == expected(tokens, LONG)
        wait_until(
            lambda: client.stats is not None and client.stats.num_running_reqs <= 1, "the end of the others"
        )
        assert rss_mb(client.engine_pid) - before < 50
        slow.send_signal(signal.SIGCONT)
        assert slow.stdout is not None
        verdict, reasons, total, messages = slow.stdout.readline().split()
        assert (verdict, reasons, int(total)) == ("right", "length", 40 * LONG)
        assert int(messages) < 40 * LONG, "deltas were merged"
        slow.wait(10)


def test_requests_of_a_client_that_does_not_read_end_when_too_much_waits(address: str) -> None:
    config = mock_config(step_ms=0.2, max_client_backlog=2000)
    with EngineClient.launch(config, lobby=address) as client, reader(address, 40, LONG) as slow:
        slow.send_signal(signal.SIGSTOP)
        tokens = prompt(100, 10)
        seen = [
            t
            for output in client.generate(tokens, SamplingParams(max_tokens=LONG))
            for t in output.new_token_ids
        ]
        assert seen == expected(tokens, LONG)
        slow.send_signal(signal.SIGCONT)
        assert slow.stdout is not None
        verdict, reasons, total, _ = slow.stdout.readline().split()
        assert (verdict, reasons) == ("right", "slow_client")
        assert int(total) < 40 * LONG
        slow.wait(10)


LARGE = """
import sys
from engine_core.client import EngineClient
from executor.sampling_params import SamplingParams
client = EngineClient.connect(sys.argv[1])
for i in range(8):
    client.add_request([i, 1, 2], SamplingParams(max_tokens=4000, logprobs=2000))
client.outputs()
print("running", flush=True)
while True:
    client.outputs()
"""


def test_clients_that_die_in_the_middle_of_a_large_message_harm_nobody(address: str) -> None:
    """With messages of several frames, libzmq would abort the engine now and then."""
    with EngineClient.launch(mock_config(step_ms=1), lobby=address) as client:
        tokens = prompt(1, 10)
        stream = client.generate(tokens, SamplingParams(max_tokens=2000))
        seen = next(stream).new_token_ids
        for _ in range(4):
            with subprocess.Popen(
                [sys.executable, "-c", LARGE, address], cwd=ROOT, stdout=subprocess.PIPE, text=True
            ) as other:
                assert other.stdout is not None and other.stdout.readline() == "running\n"
                other.send_signal(signal.SIGSTOP)
                time.sleep(0.2)  # until its end of the socket is full
                other.kill()
        seen += [token for output in stream for token in output.new_token_ids]
        assert seen == expected(tokens, 2000)


def test_an_engine_that_stops_does_not_wait_long_for_a_client_that_does_not_read(address: str) -> None:
    with EngineClient.launch(mock_config(), lobby=address) as client, reader(address, 20, 4000) as slow:
        slow.send_signal(signal.SIGSTOP)
        list(client.generate(prompt(1, 10), SamplingParams(max_tokens=2000)))
    # Leaving waits for the engine's end, and kills it after 15 s.
    assert client._connection.process is not None and client._connection.process.returncode == 0


def test_a_client_that_waits_for_a_stopped_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_core.blocking_client.WARN_AFTER_S", 0.2)
    with EngineClient.launch(mock_config(step_ms=2)) as client:
        stream = client.generate(prompt(1, 10), SamplingParams(max_tokens=200))
        next(stream)
        os.kill(client.engine_pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (client.engine_pid, signal.SIGCONT)).start()
        list(stream)
    warnings = [record.getMessage() for record in caplog.records if "nothing has come" in record.getMessage()]
    assert 1 <= len(warnings) <= 4, "ever more rarely"
    assert f"nothing has come from the engine (pid {client.engine_pid}) for" in warnings[-1]


async def test_an_asynchronous_client_that_waits_for_a_stopped_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_core.async_client.WARN_AFTER_S", 0.2)
    async with AsyncEngineClient.launch(mock_config(step_ms=2)) as client:
        call = asyncio.ensure_future(client.utility("is_sleeping"))
        await call
        os.kill(client.engine_pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.0, os.kill, client.engine_pid, signal.SIGCONT)
        await client.utility("is_sleeping")
    warnings = [record.getMessage() for record in caplog.records if "nothing has come" in record.getMessage()]
    assert 1 <= len(warnings) <= 4
