"""An engine with everything on that lets it be seen, while it starts, serves and is changed."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from engine_core.client import EngineClient
from engine_core.errors import EngineStartError, UtilityError
from engine_core.health import whom
from engine_core.kv_events import KVEventsConfig
from engine_core.lab.decision_replay import DecisionReplay
from engine_core.lab.record import RecordReader
from executor.sampling_params import SamplingParams
from tests.conftest import RunCli
from tests.engines import engine_process, expected, mock_config, prompt, wait_until
from tests.vllm_rs import free_port
from transport.state_page import StatePage

parser = pytest.importorskip("prometheus_client.parser")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answers(port: int) -> bool:
    try:
        get(port, "/health")
    except OSError:
        return False
    return True


def test_everything_on_at_once(tmp_path: Path) -> None:
    port, record = free_port(), tmp_path / "decisions.rec"
    config = mock_config(
        tensor_parallel_size=2,
        metrics_port=port,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{free_port()}"
        ),
        record=str(record),
        log_format="json",
        enable_lora=True,
    )
    with EngineClient.launch(config) as client:
        tokens = prompt(1, 100)
        for _ in range(2):
            outputs = list(client.generate(tokens, SamplingParams(max_tokens=30)))
            assert [t for output in outputs for t in output.new_token_ids] == expected(tokens, 30)
        events = [event.type for event in outputs[0].events or ()]
        assert events == [1, 2]  # queued, scheduled
        assert outputs[0].num_cached_tokens == 96
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in parser.text_string_to_metric_families(get(port, "/metrics")[1])
            for sample in family.samples
        }
        own = ("0", config.worker_cls)
        assert samples[("vllm:generation_tokens_total", *own)] == 60
        assert samples[("vllm:prefix_cache_hits_total", *own)] == 96
        assert samples["vllm:request_success_total", "0", "length", config.worker_cls] == 2
        assert samples[("engine_core:rank_steps_total", *own, "1")] > 0
        assert samples[("engine_core:queue_messages_total", *own, "steps")] > 0
        for question in ("live", "ready", "progress"):
            assert get(port, f"/health/{question}")[0] == 200
        client.pause_generation("keep")
        assert get(port, "/health/ready")[0] == 503 and get(port, "/health/live")[0] == 200
        client.set_log_level("debug")
        with pytest.raises(UtilityError, match="unknown log level"):
            client.set_log_level("loud")
    reader = RecordReader(str(record))
    replay = DecisionReplay(reader.header)
    replay.run(reader.entries(), None)
    reader.close()
    assert replay.progress.requests == 2


def test_the_rank_that_others_wait_for_in_a_collective_is_told_from_them() -> None:
    config = mock_config(worker_cls="tests.gathering_worker:GatheringWorker", tensor_parallel_size=3)
    with EngineClient.launch(config) as client:
        tokens = prompt(2, 20)
        assert len(list(client.generate(tokens, SamplingParams(max_tokens=5)))) == 5
        client.collective_rpc("come_late", args=[1, 3.0])
        client.add_request(tokens, SamplingParams(max_tokens=5))
        with StatePage.open(client.engine_pid) as page:

            def waits_for() -> list[int]:
                return [row["waits_for"] - 1 for row in page.snapshot()["ranks"]]

            named = r"rank 1 \(pid \d+\) is in execute_model for \d s, and others wait for it: 0, 2"
            wait_until(
                lambda: re.fullmatch(named, whom(page.snapshot()["ranks"], time.monotonic())) is not None,
                "ranks 0 and 2 are said to wait for rank 1",
            )
            while client.num_live:
                client.outputs(5.0)
            wait_until(lambda: waits_for() == [-1, -1, -1], "nobody waits")


def test_probes_are_answered_while_the_workers_start() -> None:
    port = free_port()
    config = mock_config(
        worker_cls="tests.slow_start_worker:SlowStartWorker",
        metrics_port=port,
        tensor_parallel_size=2,
        start_timeout_s=30.0,
    )
    with engine_process(config, lobby=f"ipc://@engine-core-test-start-{port}"):
        wait_until(lambda: answers(port), "the probes' port is open")
        assert get(port, "/health/live")[0] == 200
        status, reason = get(port, "/health/ready")
        assert status == 503 and "starting" in reason
        assert "process_cpu_seconds_total" in get(port, "/metrics")[1]


def test_a_port_that_is_taken_is_named() -> None:
    port = free_port()
    with (
        EngineClient.launch(mock_config(metrics_port=port)),
        pytest.raises(EngineStartError, match=f"metrics_port = {port}: cannot listen on 127.0.0.1"),
    ):
        EngineClient.launch(mock_config(metrics_port=port))


def test_kv_events_are_configured_with_vllms_json(run_cli: RunCli) -> None:
    wrong = run_cli("serve", "--kv-events-config", '{"enable_kv_cache_events": true, "colour": 1}')
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert "--kv-events-config" in wrong.stderr and "colour" in wrong.stderr
    taken = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://256.0.0.1:*"})
    done = run_cli("serve", "--kv-events-config", taken)
    assert done.returncode == 1 and "kv_events_config.endpoint" in done.stderr
