"""The engine process against vLLM's side of the boundary: handshake, requests, outputs, rubbish."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from engine_core.handshake import FrontEnd
from engine_core.protocol import EngineAddresses
from tests.engines import children_of, engine_process, expected, mock_config, prompt, wait_until
from tests.fake_frontend import ADD, UTILITY, FakeFrontEnd, encode


@contextlib.contextmanager
def served(front_end: FakeFrontEnd, **config: object) -> Iterator[FakeFrontEnd]:
    """An engine joined to the front end; it must end by SIGTERM and say so."""
    spec = FrontEnd(handshake_address=front_end.handshake_address)
    with engine_process(mock_config(**config), spec) as process:
        front_end.shake_hands()
        yield front_end
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeFrontEnd]:
    """One engine for tests that leave it as it was."""
    with FakeFrontEnd(num_servers=2) as front_end, served(front_end):
        yield front_end


def test_handshake_and_registration_tell_what_the_engine_is() -> None:
    with FakeFrontEnd() as front_end:
        spec = FrontEnd(
            handshake_address=front_end.handshake_address, engine_index=3, local=True, headless=False
        )
        with engine_process(mock_config(num_blocks=100, max_model_len=512), spec):
            hello, ready = front_end.shake_hands()
            assert hello == {"status": "HELLO", "local": True, "headless": False}
            assert ready == {"status": "READY", "local": True, "headless": False}
            (registration,) = front_end.registrations[b"\x03\x00"]
            assert registration["data_parallel_rank"] == 3
            assert (registration["num_gpu_blocks"], registration["block_size"]) == (100, 16)
            assert registration["max_model_len"] == 512
            assert registration["kv_cache_size_tokens"] == 99 * 16
            front_end.add([1, 2, 3], engine=3, request_id="a")
            front_end.finish("a")
            assert front_end.tokens["a"] == expected([1, 2, 3], 8)


def test_front_end_may_start_after_the_engine() -> None:
    with FakeFrontEnd() as front_end:
        front_end.handshake.unbind(front_end.handshake_address)
        with engine_process(mock_config(), FrontEnd(handshake_address=front_end.handshake_address)):
            front_end.handshake.poll(500)
            front_end.handshake.bind(front_end.handshake_address)
            front_end.shake_hands()
            front_end.call("get_supported_tasks")


def test_front_end_without_a_handshake_socket_is_joined_at_its_data_sockets() -> None:
    with FakeFrontEnd() as front_end:
        addresses = msgspec.convert(front_end.addresses, EngineAddresses)
        with engine_process(mock_config(), FrontEnd(addresses=addresses)):
            front_end.read_registrations()
            assert front_end.call("get_supported_tasks") == ["generate"]


def test_startup_calls_of_the_python_front_end_are_answered(shared: FakeFrontEnd) -> None:
    for server in (0, 1):
        assert shared.call("get_supported_tasks", server=server) == ["generate"]
        assert shared.call("reset_mm_cache", server=server, call_id=2**64 - 1 - server) is None


def test_each_api_server_gets_its_own_outputs(shared: FakeFrontEnd) -> None:
    prompts = {server: prompt(server, 40) for server in (0, 1)}
    ids = {server: shared.add(prompts[server], {"max_tokens": 20}, server=server) for server in (0, 1)}
    for server, request_id in ids.items():
        shared.finish(request_id, server=server)
        assert shared.tokens[request_id] == expected(prompts[server], 20)
        assert shared.last[request_id][5] == 1


def test_first_output_tells_how_the_prompt_was_computed(shared: FakeFrontEnd) -> None:
    tokens = prompt(77, 100)
    for cached in (0, 96):
        request_id = shared.add(tokens, {"max_tokens": 3}, trace_headers={"traceparent": "x"})
        shared.finish(request_id)
        first = shared.first[request_id]
        assert first[11]["num_prompt_tokens"] == 100 and first[11]["num_cached_tokens"] == cached
        assert [event["type"] for event in first[7]] == [1, 2]
        assert first[10] == {"traceparent": "x"}


def test_sparse_and_full_sampling_parameters_are_understood(shared: FakeFrontEnd) -> None:
    tokens = prompt(5, 10)
    stop = expected(tokens, 6)
    rust = {
        "temperature": 1.0, "top_p": 0.8999999761581421, "top_k": 0, "min_p": 0.0, "seed": None,
        "max_tokens": 30, "stop_token_ids": [], "_eos_token_id": stop[4], "_all_stop_token_ids": [stop[4]],
        "watermarking": True, "output_kind": 1, "detokenize": False, "n": 1, "logit_bias": None,
        "structured_outputs": None,
    }  # fmt: skip
    request_id = shared.add(tokens, rust, reasoning_parser_kwargs={"chat_template_kwargs": {}})
    shared.finish(request_id)
    assert shared.tokens[request_id] == stop[:5]
    assert shared.last[request_id][5] == 0 and shared.last[request_id][6] is None
    request_id = shared.add(tokens, {"stop_token_ids": [stop[2]]})
    shared.finish(request_id)
    assert shared.tokens[request_id] == stop[:3] and shared.last[request_id][6] == stop[2]


def test_logprobs_have_numpy_names_for_samples_and_torch_names_for_prompts(shared: FakeFrontEnd) -> None:
    request_id = shared.add(prompt(6, 22), {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1})
    shared.finish(request_id)
    first = shared.first[request_id]
    (id_type, id_shape, ids), (lp_type, lp_shape, _), (rank_type, rank_shape, ranks), cut = first[2]
    assert (id_type, lp_type, rank_type, cut) == ("<i4", "<f4", "<i4", None)
    assert (id_shape, lp_shape, rank_shape) == ([1, 3], [1, 3], [1])
    assert np.frombuffer(ids, "<i4")[0] == first[1][0] and np.frombuffer(ranks, "<i4").tolist() == [1]
    assert [part and part[:2] for part in first[3]] == [
        ["int32", [21, 2]], ["float32", [21, 2]], ["int32", [21]], None, None
    ]  # fmt: skip
    assert shared.last[request_id][3] is None


def test_abort_ends_a_request_in_silence(shared: FakeFrontEnd) -> None:
    request_id = shared.add(prompt(8, 10), {"max_tokens": 4000})
    shared.abort(request_id, "unknown")
    shared.call("get_supported_tasks")
    while not shared.is_silent():
        shared.receive()
    assert request_id not in shared.last
    assert shared.call("abort_requests", [request_id]) == []


BAD_REQUESTS = {
    "empty prompt": ([], {"max_tokens": 4}, "prompt_token_ids is empty"),
    "no prompt": (None, {"max_tokens": 4}, "prompt_token_ids is empty"),
    "token out of range": ([1, 32000], {"max_tokens": 4}, "prompt_token_ids[1] = 32000"),
    "negative token": ([-1], {"max_tokens": 4}, "prompt_token_ids[0] = -1"),
    "no tokens wanted": ([1], {"max_tokens": 0}, "max_tokens = 0"),
    "too long": ([1] * 4096, {"max_tokens": 4}, "max_model_len is 4096"),
    "wrong type": ([1, "a"], {"max_tokens": 4}, "prompt_token_ids[1]"),
    "wrong parameter": ([1], {"max_tokens": "four"}, "sampling_params.max_tokens"),
    "structured output": ([1], {"structured_outputs": {"json": "{}"}}, "structured_outputs"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request_is_answered_with_a_validation_error(shared: FakeFrontEnd, case: str) -> None:
    tokens, params, message = BAD_REQUESTS[case]
    request_id = shared.add(tokens, params, server=1)
    shared.finish(request_id, server=1)
    output = shared.last[request_id]
    assert output[1] == [] and output[5] == 3
    assert output[18]["code"] == "validation_error" and not output[18]["retryable"]
    assert message in output[18]["message"]
    assert request_id in shared.finished_requests


def test_duplicate_id_is_answered_with_an_error(shared: FakeFrontEnd) -> None:
    shared.add(prompt(1, 5), {"max_tokens": 4000}, request_id="twice")
    shared.add(prompt(1, 5), {"max_tokens": 4000}, request_id="twice", server=1)
    shared.finish("twice", server=1)
    assert shared.last["twice"][18]["code"] == "duplicate_request_id"
    shared.last.clear()
    assert shared.call("abort_requests", ["twice"]) == ["twice"]


RUBBISH = {
    "no payload": [b"\x00"],
    "empty type": [b"", b"x"],
    "unknown type": [b"\x09", encode([1])],
    "long type": [b"\x00" * 100, encode([1])],
    "executor failed": [b"\x04", b""],
    "truncated": [ADD, encode(["id", [1, 2]])[:-2]],
    "no array": [ADD, encode({"request_id": "x"})],
    "not msgpack": [ADD, b"\xc1" * 50],
    "deep": [ADD, b"\x91" * 100_000],
    "pickle": [ADD, encode([msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'x'\ntR.")])],
    "aborts of numbers": [b"\x01", encode([1, 2])],
    "utility without method": [UTILITY, encode([0, 1])],
    "other client": [UTILITY, encode([7, 1, "is_sleeping", []])],
    "wave": [b"\x02", encode([0, None])],
}


def test_rubbish_harms_nobody(shared: FakeFrontEnd) -> None:
    for frames in RUBBISH.values():
        shared.send(frames)
    rng = np.random.default_rng(0)
    for _ in range(200):
        shared.send([bytes([int(rng.integers(0, 5))]), rng.bytes(int(rng.integers(0, 60)))])
    request_id = shared.add([1, 2, 3])
    shared.finish(request_id)
    assert shared.tokens[request_id] == expected([1, 2, 3], 8)


def test_unreadable_request_with_a_readable_id_is_answered(shared: FakeFrontEnd) -> None:
    shared.send([ADD, encode(["broken-1", [1, 2]])])
    shared.send([ADD, encode(["broken-2"])[:-1] + b"2\xc1\xc1"])
    shared.finish("broken-1")
    assert "mm_features is missing" in shared.last["broken-1"][18]["message"]


def test_oversize_request_is_refused_before_it_is_decoded(shared: FakeFrontEnd) -> None:
    request_id = shared.add([1] * (6 << 20))
    shared.finish(request_id)
    assert "bytes" in shared.last[request_id][18]["message"]


def test_utility_calls_check_their_arguments(shared: FakeFrontEnd) -> None:
    for method, args, message in (
        ("no_such_method", [], "no utility method"),
        ("reset_prefix_cache", ["yes"], "argument reset_running: Expected bool, got str"),
        ("reset_prefix_cache", [True, True, True], "at most 2 arguments"),
        ("set_weight_version", [], "lacks the argument weight_version"),
        ("sleep", [7, "keep"], "sleep level 7"),
        ("__init__", [], "no utility method"),
        ("collective_rpc", ["no_such_method"], "no_such_method"),
    ):
        with pytest.raises(AssertionError, match=message) as caught:
            shared.call(method, *args)
        assert f"Call to {method} method failed: " in str(caught.value)
    assert shared.call("is_sleeping") is False
    assert shared.call("collective_rpc", "check_health", None, [], None) == [None]


def test_weight_version_stamps_the_outputs(shared: FakeFrontEnd) -> None:
    for version in ("v2", "default"):
        shared.call("set_weight_version", version)
        assert shared.call("get_weight_version") == version
        request_id = shared.add([1, 2])
        while request_id not in shared.last:
            envelope = shared.receive()
            assert envelope is not None and envelope[8] == version


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_pause_modes(async_scheduling: bool) -> None:
    with FakeFrontEnd() as front_end, served(front_end, async_scheduling=async_scheduling, step_ms=2):
        tokens = prompt(3, 20)
        # abort: everything ends, new requests are refused until resume
        running = front_end.add(tokens, {"max_tokens": 4000})
        front_end.receive()
        front_end.call("pause_generation", "abort", True)
        assert front_end.last[running][5] == 2
        refused = front_end.add(tokens)
        front_end.finish(refused)
        assert front_end.last[refused][18] == {
            "code": "engine_paused", "message": "Generation is paused. Please retry after it resumes.",
            "retryable": True,
        }  # fmt: skip
        assert front_end.call("is_scheduler_paused") is True and front_end.call("is_sleeping") is True
        front_end.call("resume_scheduler")

        # wait: running requests end by themselves, the answer comes after
        running = front_end.add(tokens, {"max_tokens": 20})
        front_end.receive()
        front_end.call("pause_generation", "wait", False)
        assert front_end.tokens[running] == expected(tokens, 20) and front_end.last[running][5] == 1
        front_end.call("resume_scheduler")

        # keep: frozen, queued, and continued
        running = front_end.add(tokens, {"max_tokens": 50})
        front_end.receive()
        front_end.call("pause_generation", "keep", False)
        queued = front_end.add(tokens[:10], {"max_tokens": 5})
        assert front_end.is_silent() and front_end.call("is_scheduler_paused") is True
        front_end.call("resume_scheduler")
        front_end.finish(running, queued)
        assert front_end.tokens[running] == expected(tokens, 50)
        assert front_end.tokens[queued] == expected(tokens[:10], 5)


def test_prefix_cache_reset_waits_for_nobody(shared: FakeFrontEnd) -> None:
    tokens = prompt(9, 64)
    request_id = shared.add(tokens, {"max_tokens": 2})
    shared.finish(request_id)
    assert shared.call("reset_prefix_cache", False, False) is True
    request_id = shared.add(tokens, {"max_tokens": 2})
    shared.finish(request_id)
    assert shared.first[request_id][11]["num_cached_tokens"] == 0


@pytest.mark.parametrize("timeout_s", [0.0, 20.0])
def test_stop_aborts_at_once_or_drains(timeout_s: float) -> None:
    with FakeFrontEnd() as front_end:
        config = mock_config(shutdown_timeout=timeout_s, step_ms=5)
        with engine_process(config, FrontEnd(handshake_address=front_end.handshake_address)) as process:
            front_end.shake_hands()
            tokens = prompt(2, 30)
            request_id = front_end.add(tokens, {"max_tokens": 60})
            front_end.receive()
            process.send_signal(signal.SIGINT)
            front_end.finish(request_id)
            assert process.wait(10) == 128 + signal.SIGINT
        assert not front_end.engine_dead
        if timeout_s:
            assert front_end.tokens[request_id] == expected(tokens, 60)
        else:
            assert front_end.last[request_id][5] == 2 and request_id in front_end.finished_requests


def test_requests_during_a_drain_are_refused() -> None:
    with FakeFrontEnd() as front_end:
        config = mock_config(shutdown_timeout=20.0, step_ms=10)
        with engine_process(config, FrontEnd(handshake_address=front_end.handshake_address)) as process:
            front_end.shake_hands()
            first = front_end.add([1, 2], {"max_tokens": 200})
            front_end.receive()
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: _refused(front_end), "refusal")
            with pytest.raises(AssertionError, match="Server shutting down"):
                front_end.call("is_sleeping")
            front_end.finish(first)
            assert front_end.tokens[first] == expected([1, 2], 200)


def _refused(front_end: FakeFrontEnd) -> bool:
    request_id = front_end.add([1, 2], {"max_tokens": 1})
    front_end.finish(request_id)
    return bool(front_end.last[request_id][5] == 2)


def test_second_signal_forces() -> None:
    with FakeFrontEnd() as front_end:
        config = mock_config(shutdown_timeout=600.0, step_ms=100, tensor_parallel_size=2)
        with engine_process(config, FrontEnd(handshake_address=front_end.handshake_address)) as process:
            front_end.shake_hands()
            front_end.add([1, 2], {"max_tokens": 4000})
            front_end.receive()
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: _refused(front_end), "refusal")
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_waiting_for_the_front_end_ends_the_start(signum: signal.Signals) -> None:
    with FakeFrontEnd() as front_end:
        spec = FrontEnd(handshake_address=front_end.handshake_address)
        with engine_process(mock_config(), spec) as process:
            assert front_end.handshake.poll(10_000)
            process.send_signal(signum)
            assert process.wait(5) == 128 + signum
            assert process.stderr is not None and process.stderr.read() == ""


def test_crash_is_told_with_the_sentinel_and_a_first_cause() -> None:
    config = mock_config(step_ms=1, tensor_parallel_size=2, on_worker_failure="fail")
    with FakeFrontEnd(num_servers=2) as front_end:
        spec = FrontEnd(handshake_address=front_end.handshake_address)
        with engine_process(config, spec) as process:
            front_end.shake_hands()
            front_end.add([1, 2], {"max_tokens": 4000})
            front_end.receive()
            victim = children_of(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            while front_end.receive() is not None:
                pass
            assert front_end.receive(server=1) is None
            assert process.wait(15) == 1
            assert process.stderr is not None
            text = process.stderr.read()
        assert f"(pid {victim}) was killed by SIGKILL" in text


def test_coordinator_gate_counts_and_finished_requests() -> None:
    with contextlib.ExitStack() as stack:
        front_end = stack.enter_context(FakeFrontEnd(num_servers=2, coordinator=True, num_engines=2))
        for index in range(2):
            spec = FrontEnd(handshake_address=front_end.handshake_address, engine_index=index)
            stack.enter_context(engine_process(mock_config(step_ms=1), spec))
        front_end.shake_hands()
        registration = front_end.registrations[b"\x01\x00"][0]
        assert registration["dp_stats_address"] == "tcp://127.0.0.1:1"
        assert registration["coordinator_input_address"] == front_end.addresses["coordinator_input"]
        tokens = prompt(4, 10)
        done = front_end.add(tokens, {"max_tokens": 30}, server=1, engine=1)
        front_end.finish(done, server=1)
        aborted = front_end.add(tokens, {"max_tokens": 4000}, server=0, engine=0)
        while aborted not in front_end.first:  # the other engine's statistics may come here too
            front_end.receive()
        front_end.abort(aborted)
        while {done, aborted} - set(front_end.finished_requests):
            front_end.receive(0 if done in front_end.finished_requests else 1)
        assert front_end.coordinator_output is not None
        counts: dict[int, list[int]] = {0: [], 1: []}
        while not all(seen and seen[-1] == 0 for seen in counts.values()):
            assert front_end.coordinator_output.poll(5000)
            engine, outputs, stats, _, *rest = msgspec.msgpack.decode(front_end.coordinator_output.recv())
            assert outputs == [] and rest == [None] * 5
            counts[engine].append(stats["num_running_reqs"] + stats["num_waiting_reqs"])
        assert all(set(seen) == {0, 1} for seen in counts.values())
        assert front_end.coordinator_input is not None
        front_end.coordinator_input.send(b"READY")
        front_end.coordinator_input.send_multipart([b"\x02", encode([0, None])])
        assert front_end.call("get_supported_tasks", server=1, engine=1) == ["generate"]


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (b"\xc1", "not one"),
        (encode({"addresses": {"inputs": [], "outputs": []}}), "pairs"),
        (encode({"addresses": {"inputs": ["tcp://127.0.0.1:1"], "outputs": []}}), "pairs"),
        (encode({"addresses": {"inputs": ["bogus"], "outputs": ["tcp://127.0.0.1:1"]}}), "cannot be dialled"),
        (encode({"addresses": {"inputs": 5, "outputs": []}}), "addresses.inputs"),
    ],
)
def test_start_ends_with_a_clear_error_for_a_bad_init(init: bytes, message: str) -> None:
    with FakeFrontEnd() as front_end:
        spec = FrontEnd(handshake_address=front_end.handshake_address)
        with engine_process(mock_config(), spec) as process:
            engine, _ = front_end.handshake.recv_multipart()
            front_end.handshake.send_multipart([engine, init])
            assert process.wait(15) == 1
            assert process.stderr is not None
            assert message in process.stderr.read()
