"""A vLLM front end that dies, and one that takes its place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import zmq

from engine_core.client import EngineClient
from engine_core.handshake import FrontEnd
from engine_core.protocol import EngineAddresses
from executor.mock_model import mock_tokens
from executor.sampling_params import SamplingParams
from tests import vllm_rs
from tests.engines import children_of, engine_process, expected, is_running, mock_config, prompt, wait_until
from tests.fake_frontend import FakeFrontEnd

LONG = {"max_tokens": 4000}


class FrontEndProcess(FakeFrontEnd):
    """One that is closed when its test ends, however that ends."""

    made: ClassVar[list[FakeFrontEnd]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)


@pytest.fixture(autouse=True)
def _close_front_ends() -> Iterator[None]:
    yield
    while FrontEndProcess.made:
        FrontEndProcess.made.pop().close()


class Successor(FrontEndProcess):
    """Listens where another one did: at its data addresses as well, or only for its handshake."""

    def __init__(self, before: FakeFrontEnd, *, same_data_addresses: bool) -> None:
        data = [*before.addresses["inputs"], *before.addresses["outputs"]]
        self._addresses = [before.handshake_address, *(data if same_data_addresses else [])]
        super().__init__(num_servers=len(before.inputs))

    def _bind(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        if not self._addresses:
            return super()._bind(kind)
        address = self._addresses.pop(0)
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        deadline = time.monotonic() + 5
        while True:  # the one before may not have let go of it yet
            try:
                socket.bind(address)
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                return socket, address


def run_into_death(front_end: FakeFrontEnd) -> None:
    """It has requests in flight when it goes."""
    for i in range(10):
        front_end.add([i, 1, 2], LONG, request_id=f"old-{i}")
    front_end.receive()
    front_end.close()


def serves(front_end: FakeFrontEnd) -> bool:
    front_end.add([1, 2, 3], request_id="new")
    front_end.finish("new")
    return front_end.tokens["new"] == expected([1, 2, 3], 8)


def nothing_runs(client: EngineClient) -> bool:
    """With no request, no block is held."""
    return client.utility("reset_prefix_cache") is True


def test_front_end_that_dies_has_its_requests_aborted_and_others_are_not_disturbed(tmp_path: Path) -> None:
    front_end = FrontEndProcess()
    addresses = msgspec.convert(front_end.addresses, EngineAddresses)
    lobby = f"ipc://{tmp_path}/lobby"
    with engine_process(mock_config(step_ms=1), FrontEnd(addresses=addresses), lobby) as process:
        front_end.read_registrations()
        assert process.stdout is not None and process.stdout.readline().startswith("serving")
        with EngineClient.connect(lobby) as client:
            tokens = prompt(1, 10)
            stream = client.generate(tokens, SamplingParams(max_tokens=300))
            seen = next(stream).new_token_ids
            run_into_death(front_end)
            seen += [token for output in stream for token in output.new_token_ids]
            assert seen == expected(tokens, 300)
            wait_until(lambda: nothing_runs(client), "the end of the dead one's requests")


def test_front_end_that_comes_back_at_the_same_addresses_is_served() -> None:
    front_end = FrontEndProcess(num_servers=2)
    addresses = msgspec.convert(front_end.addresses, EngineAddresses)
    with engine_process(mock_config(step_ms=1), FrontEnd(addresses=addresses)):
        front_end.read_registrations()
        for _ in range(3):
            run_into_death(front_end)
            front_end = Successor(front_end, same_data_addresses=True)
            front_end.read_registrations()
            # An output of an unknown request is nothing to a front end.
            assert serves(front_end)


def test_front_end_that_comes_back_at_other_addresses_shakes_hands_and_is_served() -> None:
    front_end = FrontEndProcess()
    with engine_process(mock_config(step_ms=1), FrontEnd(handshake_address=front_end.handshake_address)):
        front_end.shake_hands()
        for _ in range(3):
            run_into_death(front_end)
            front_end = Successor(front_end, same_data_addresses=False)
            front_end.shake_hands()
            assert serves(front_end)


def test_front_end_that_dies_in_the_middle_of_its_second_handshake_is_awaited_again() -> None:
    front_end = FrontEndProcess()
    with engine_process(mock_config(), FrontEnd(handshake_address=front_end.handshake_address)):
        front_end.shake_hands()
        run_into_death(front_end)
        front_end = Successor(front_end, same_data_addresses=False)
        assert front_end.handshake.poll(5000)  # HELLO has come, and is not answered
        front_end.close()
        front_end = Successor(front_end, same_data_addresses=False)
        front_end.shake_hands()
        assert serves(front_end)


def test_engine_without_its_front_end_stops_when_told() -> None:
    front_end = FrontEndProcess()
    spec = FrontEnd(handshake_address=front_end.handshake_address)
    with engine_process(mock_config(), spec) as process:
        front_end.shake_hands()
        run_into_death(front_end)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM


def test_vllm_rs_that_is_killed_and_started_again_is_served(
    vllm_model: vllm_rs.Model, tmp_path: Path
) -> None:
    """The real one, with requests in flight, on the same engine."""
    port = str(vllm_rs.free_port())
    spec = FrontEnd(handshake_address=f"tcp://127.0.0.1:{port}")
    config = mock_config(step_ms=1)
    options = {**config.worker_options, "vocab_size": vllm_model.vocab_size}
    front_end = ["--data-parallel-size", "1", "--data-parallel-size-local", "0"]
    front_end += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port]
    with engine_process(msgspec.structs.replace(config, worker_options=options), spec):
        for _ in range(2):
            with vllm_rs.serve_front_end(vllm_model, tmp_path, front_end) as server:
                answer = server.post("/v1/completions", prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
                assert answer["usage"]["completion_tokens"] == 5
                stream = server.stream("/v1/completions", prompt=[4, 5], max_tokens=2000, ignore_eos=True)
                next(stream)
                os.kill(server.pid, signal.SIGKILL)
                wait_until(lambda: not is_running(server.pid), "the end of vllm-rs")


def test_engine_that_vllm_rs_started_ends_with_it(vllm_model: vllm_rs.Model, tmp_path: Path) -> None:
    options = ["--tensor-parallel-size", "2"]
    with vllm_rs.serve_managed(vllm_model, tmp_path, options) as server:
        engines = children_of(server.pid)
        family = [*engines, *(rank for engine in engines for rank in children_of(engine))]
        assert len(family) == 3
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, family)), "the end of engine and ranks", 5)


def test_vllm_rs_sees_a_pause_when_a_rank_is_killed(vllm_model: vllm_rs.Model, tmp_path: Path) -> None:
    options = ["--tensor-parallel-size", "2", "--mock-step-ms", "2"]
    request = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    with vllm_rs.serve_external(vllm_model, tmp_path, options) as server:
        (engine,) = [pid for pid in children_of(os.getpid()) if len(children_of(pid)) == 2]
        stream = server.stream("/v1/completions", **request)
        chunks = [next(stream)]
        os.kill(children_of(engine)[1], signal.SIGKILL)
        chunks += stream
        parts = [choice for chunk in chunks for choice in chunk["choices"]]
        seen = [token for part in parts for token in part.get("token_ids") or []]
        assert seen == mock_tokens([5, 6, 7], 300, vllm_model.vocab_size).tolist()
    assert "the ranks are up again" in (tmp_path / "engine.log").read_text()
