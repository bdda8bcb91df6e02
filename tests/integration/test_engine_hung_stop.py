"""An engine that hangs in a step ends when it is told to."""

from __future__ import annotations

import os
import signal
import time

import msgspec

from engine_core.client import EngineClient
from executor.sampling_params import SamplingParams
from tests.engines import is_running, mock_config, wait_until
from transport.state_page import StatePage


def test_a_signal_ends_an_engine_whose_ranks_hang() -> None:
    config = msgspec.structs.replace(mock_config(tensor_parallel_size=2, step_ms=20), stop_grace_s=0.2)
    with EngineClient.launch(config) as client:
        client.add_request([1, 2, 3], SamplingParams(max_tokens=4000))
        client.outputs()
        pid = client.engine_pid
        with StatePage.open(pid) as page:
            ranks = [row["pid"] for row in page.snapshot()["ranks"]]
            os.kill(ranks[0], signal.SIGSTOP)
            step = page.snapshot()["engine"]["step_id"]
            time.sleep(0.2)
            wait_until(lambda: page.snapshot()["ranks"][1]["phase"] == "waiting", "the engine waits")
            assert page.snapshot()["engine"]["step_id"] <= step + 3
        os.kill(pid, signal.SIGTERM)
        # stop_grace_s, then what a teardown by force may take; a step may take minutes.
        wait_until(lambda: not is_running(pid), "the engine has ended", 20.0)
        assert not any(map(is_running, ranks))
