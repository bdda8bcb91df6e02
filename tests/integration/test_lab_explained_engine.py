"""`explain`, asked of a running engine by clients and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_core.async_client import AsyncEngineClient
from engine_core.client import EngineClient
from engine_core.errors import UtilityError
from executor.sampling_params import SamplingParams
from tests.conftest import RunCli
from tests.engines import engine_process, mock_config, prompt, wait_until


async def test_an_engine_explains_its_requests(tmp_path: Path, run_cli: RunCli) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    config = mock_config(step_ms=5.0, max_num_seqs=1, distributed_executor_backend="mp")
    with engine_process(config, lobby=address):
        wait_until(Path(tmp_path, "engine.sock").exists, "the engine's socket")
        with EngineClient.connect(address) as client:
            ids = [
                client.add_request(
                    prompt(index, 20), SamplingParams(max_tokens=2000), request_id=f"r-{index}"
                )
                for index in range(2)
            ]
            assert len(client.outputs()) == 1
            running, waiting = (client.explain(request_id) for request_id in ids)
            assert (running.state, waiting.state) == ("running", "waiting")
            assert [wait.what for wait in waiting.waits_for] == ["seats"]
            async with AsyncEngineClient.connect(address) as other:
                assert (await other.explain("r-1")).request_id == ids[1]
                with pytest.raises(UtilityError, match="no request 'nobody'"):
                    await other.explain("nobody")

            done = run_cli("explain", "r-1", "--connect", address)
            assert done.returncode == 0, done.stderr
            assert "waiting" in done.stdout and "all 1 seats are taken" in done.stdout
            client.abort(ids)
            answer = json.loads(run_cli("explain", "r-0", "--connect", address, "--json").stdout)
            assert (answer["state"], answer["finish_reason"]) == ("finished", "abort")
            done = run_cli("explain", "r-", "--connect", address)
            assert done.returncode == 1 and "2 requests begin with 'r-'" in done.stderr
