"""vLLM's development routes, with curl, through its Rust front end; and the truth in its /metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from executor.mock_model import mock_tokens
from tests import vllm_rs
from tests.vllm_rs import Model, Server

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

PROMPT = list(range(1, 101))


@pytest.fixture(scope="module")
def server(vllm_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = ["--tensor-parallel-size", "2", "--mock-step-ms", "4", "--enable-sleep-mode", "--enable-lora"]
    args += ["--max-num-seqs", "4", "--num-gpu-blocks-override", "40", "--metrics-port", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with vllm_rs.serve_external(vllm_model, tmp_path_factory.mktemp("controls"), args) as running:
            yield running


def curl(server: Server, *args: str) -> tuple[int, Any]:
    """`curl ARGS... PATH`: status and decoded body."""
    *options, path = args
    command = ["curl", "-s", "-w", "\n%{http_code}", *options, f"http://127.0.0.1:{server.port}{path}"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    body, _, status = output.rpartition("\n")
    return int(status), json.loads(body) if body else None


def complete(server: Server, count: int = 5, prompt: list[int] = PROMPT) -> tuple[int, Any]:
    request = {
        "model": str(server.model.path),
        "prompt": prompt,
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return curl(server, "-H", "content-type: application/json", "-d", json.dumps(request), "/v1/completions")


def assert_serves(server: Server) -> None:
    status, answer = complete(server)
    assert status == 200, answer
    expected = mock_tokens(PROMPT, 5, server.model.vocab_size).tolist()
    assert answer["choices"][0]["token_ids"] == expected


def test_pause_refuses_and_resume_serves(server: Server) -> None:
    assert curl(server, "/is_paused") == (200, {"is_paused": False})
    assert curl(server, "-X", "POST", "/pause") == (200, {"status": "paused"})
    assert curl(server, "/is_paused") == (200, {"is_paused": True})
    status, answer = complete(server)
    assert status == 503 and "paused" in answer["error"]["message"]
    assert curl(server, "-X", "POST", "/resume") == (200, {"status": "resumed"})
    assert curl(server, "/is_paused") == (200, {"is_paused": False})
    assert_serves(server)


def test_pause_that_keeps_freezes_requests_and_queues_new_ones(server: Server) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(complete, server, 200)
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 1, "it runs")
        assert curl(server, "-X", "POST", "/pause?mode=keep") == (200, {"status": "paused"})
        queued = pool.submit(complete, server, 3)
        time.sleep(0.3)
        assert not running.done() and not queued.done()
        curl(server, "-X", "POST", "/resume")
        expected = mock_tokens(PROMPT, 200, server.model.vocab_size).tolist()
        assert running.result(20)[1]["choices"][0]["token_ids"] == expected
        assert queued.result(20)[0] == 200


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(server: Server, level: int) -> None:
    assert curl(server, "-X", "POST", f"/sleep?level={level}") == (
        200,
        {"status": "sleeping", "level": level},
    )
    assert curl(server, "/is_sleeping") == (200, {"is_sleeping": True})
    assert curl(server, "-X", "POST", "/wake_up?tags=weights")[1]["status"] == "sleeping"
    assert curl(server, "-X", "POST", "/wake_up?tags=kv_cache")[1]["status"] == "awake"
    assert curl(server, "/is_sleeping") == (200, {"is_sleeping": False})
    assert_serves(server)


def test_the_prefix_cache_is_reset(server: Server) -> None:
    assert_serves(server)
    assert curl(server, "-X", "POST", "/reset_prefix_cache") == (200, {"success": True})
    before = server.metric("vllm:prefix_cache_hits_total")
    assert_serves(server)
    assert server.metric("vllm:prefix_cache_hits_total") == before


def test_the_weight_version_and_calls_of_workers(server: Server) -> None:
    body = ["-H", "content-type: application/json", "-d"]
    assert curl(server, *body, '{"new_version": "v9"}', "/update_weight_version")[0] == 200
    assert curl(server, "/weight_info") == (200, {"weight_version": "v9"})
    assert curl(server, *body, '{"method": "list_loras"}', "/collective_rpc") == (200, {"results": [[], []]})


def test_metrics_tell_what_happened(server: Server) -> None:
    """Six requests of 100 tokens in 39 blocks: four run at most, and some are preempted."""
    names = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries")
    before = {name: server.metric(f"vllm:{name}_total") for name in names}
    with ThreadPoolExecutor() as pool:
        prompts = [[seed, *PROMPT[1:]] for seed in range(1, 7)]
        answers = [pool.submit(complete, server, 80, prompt) for prompt in prompts]
        server.wait_until(lambda: server.metric("vllm:num_requests_waiting") > 0, "somebody waits")
        server.wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") > 0.6, "blocks are held")
        assert 0 < server.metric("vllm:num_requests_running") <= 4
        assert all(answer.result(25)[0] == 200 for answer in answers)
    server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "all have ended")
    after = {name: server.metric(f"vllm:{name}_total") - before[name] for name in names}
    assert after["prompt_tokens"] == after["prefix_cache_queries"] == 600
    assert after["generation_tokens"] == 480
    assert after["num_preemptions"] > 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    # The engine's own series say the same.
    (port,) = re.findall(
        r"Metrics and health at http://127.0.0.1:(\d+)", server.log.with_name("engine.log").read_text()
    )
    own = Server(server.pid, int(port), server.model, server.log)
    for name in names:
        assert own.metric(f"vllm:{name}_total") == server.metric(f"vllm:{name}_total")
    assert own.request("GET", "/health/ready")[0] == 200
