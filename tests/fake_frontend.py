"""A vLLM front end for tests: its side of the boundary over real sockets, as strict as the Rust one.

Every message from the engine is checked: at most 9 fields, one family of content, the statistics' keys, no
nil where a number belongs, nothing after a request's last output.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import TracebackType
from typing import Any

import msgspec
import zmq

from engine_core.protocol import ENGINE_CORE_DEAD

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
TIMEOUT_MS = 20_000
STATS_KEYS = {
    "num_running_reqs", "num_waiting_reqs", "step_counter", "current_wave", "kv_cache_usage",
    "prefix_cache_stats", "kv_cache_eviction_events",
}  # fmt: skip
READY_KEYS = {
    "max_model_len", "num_gpu_blocks", "block_size", "dp_stats_address", "dtype", "vllm_version",
    "world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
    "decode_context_parallel_size", "data_parallel_rank", "max_num_seqs", "max_num_batched_tokens",
    "instance_id", "supports_lora", "max_loras",
}  # fmt: skip

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


class FakeFrontEnd:
    """Binds everything at once; `num_servers` API servers, and a coordinator if asked for."""

    def __init__(self, num_servers: int = 1, coordinator: bool = False, num_engines: int = 1) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handshake, self.handshake_address = self._bind(zmq.ROUTER)
        inputs = [self._bind(zmq.ROUTER) for _ in range(num_servers)]
        outputs = [self._bind(zmq.PULL) for _ in range(num_servers)]
        self.inputs, self.outputs = [s for s, _ in inputs], [s for s, _ in outputs]
        self.addresses: dict[str, Any] = {
            "inputs": [address for _, address in inputs],
            "outputs": [address for _, address in outputs],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": "tcp://127.0.0.1:1" if coordinator else None,
        }
        self.coordinator_input = self.coordinator_output = None
        if coordinator:
            self.coordinator_input, self.addresses["coordinator_input"] = self._bind(zmq.XPUB)
            self.coordinator_output, self.addresses["coordinator_output"] = self._bind(zmq.PULL)
        self.num_engines = num_engines
        self.registrations: dict[bytes, list[dict[str, Any]]] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, list[Any]] = {}  # the final output of each request, as it came
        self.first: dict[str, list[Any]] = {}
        self.finished_requests: list[str] = []
        self.answers: dict[int, list[Any]] = {}
        self.engine_dead = False
        self._numbers = itertools.count()

    def _bind(self, kind: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        return socket, f"tcp://127.0.0.1:{port}"

    # Start

    def shake_hands(self) -> list[dict[str, Any]]:
        """HELLO to READY and the registrations, for all engines; returns the handshake's messages."""
        messages = []
        waiting_for_hello = self.num_engines
        gate_open = self.coordinator_input is None
        ready = 0
        while ready < self.num_engines:
            if not gate_open and waiting_for_hello == 0:
                assert self.coordinator_input is not None
                for _ in range(self.num_engines):
                    assert receive(self.coordinator_input) == [b"\x01"]
                self.coordinator_input.send(b"READY")
                gate_open = True
            engine, *frames = receive(self.handshake)
            assert len(frames) == 1 and len(engine) == 2
            message = decode(frames[0])
            assert message.keys() >= {"status", "local", "headless"}
            messages.append(message)
            if message["status"] == "HELLO":
                waiting_for_hello -= 1
                init = {"addresses": self.addresses, "parallel_config": {}}
                self.handshake.send_multipart([engine, encode(init)])
            else:
                assert message["status"] == "READY" and gate_open
                ready += 1
        self.read_registrations()
        return messages

    def read_registrations(self) -> None:
        for socket in self.inputs:
            for _ in range(self.num_engines):
                engine, *frames = receive(socket)
                assert len(frames) == 1
                registration = decode(frames[0])
                assert registration.keys() >= READY_KEYS
                assert registration["supports_lora"] == (registration["max_loras"] > 0)
                assert registration["dtype"] in ("float16", "bfloat16", "float32")
                self.registrations.setdefault(engine, []).append(registration)

    # Requests

    def add(
        self,
        prompt: Any,
        sampling_params: dict[str, Any] | None = None,
        *,
        request_id: str | None = None,
        server: int = 0,
        engine: int = 0,
        **fields: Any,
    ) -> str:
        """As vLLM's front ends encode a text request."""
        request_id = request_id or f"req-{next(self._numbers)}"
        params = sampling_params if sampling_params is not None else {"max_tokens": 8}
        request: dict[str, Any] = dict.fromkeys(REQUEST_FIELDS)
        request |= {"request_id": request_id, "prompt_token_ids": prompt, "sampling_params": params}
        request |= {"arrival_time": 1e9, "client_index": server, "current_wave": 0, "priority": 0}
        request |= {"resumable": False, "abort_immediately": False, **fields}
        self.send([ADD, encode(list(request.values()))], server=server, engine=engine)
        return request_id

    def abort(self, *request_ids: str, server: int = 0, engine: int = 0) -> None:
        self.send([ABORT, encode(list(request_ids))], server=server, engine=engine)

    def call(
        self, method: str, *args: Any, server: int = 0, engine: int = 0, call_id: int | None = None
    ) -> Any:
        """Call and wait: the result, or the failure message as an `AssertionError`."""
        call_id = next(self._numbers) if call_id is None else call_id
        self.send([UTILITY, encode([server, call_id, method, list(args)])], server=server, engine=engine)
        while call_id not in self.answers:
            self.receive(server)
        _, failure, result = self.answers.pop(call_id)
        assert failure is None, failure
        assert isinstance(result, list) and len(result) == 2 and result[0] is None
        return result[1]

    def send(self, frames: list[bytes], *, server: int = 0, engine: int = 0) -> None:
        self.inputs[server].send_multipart([engine.to_bytes(2, "little"), *frames])

    # Outputs

    def finish(self, *request_ids: str, server: int = 0) -> None:
        """Receive until all of these have ended."""
        while not all(request_id in self.last for request_id in request_ids):
            self.receive(server)

    def receive(self, server: int = 0, timeout_ms: int = TIMEOUT_MS) -> list[Any] | None:
        """One message, checked and filed; None for ENGINE_CORE_DEAD."""
        frames = receive(self.outputs[server], timeout_ms)
        if frames == [ENGINE_CORE_DEAD]:
            self.engine_dead = True
            return None
        envelope = decode(frames[0], ext_hook=lambda code, data: bytes(data))
        check_envelope(envelope)
        envelope += [None] * (9 - len(envelope))
        for output in envelope[1]:
            self._file(output)
        if envelope[4] is not None:
            self.answers[envelope[4][0]] = envelope[4]
        for request_id in envelope[5] or ():
            self.finished_requests.append(request_id)
        return list(envelope)

    def is_silent(self, server: int = 0, timeout_ms: int = 300) -> bool:
        return not self.outputs[server].poll(timeout_ms)

    def _file(self, output: list[Any]) -> None:
        request_id, tokens = output[0], output[1]
        assert request_id not in self.last, f"an output of {request_id} after its last"
        self.first.setdefault(request_id, output)
        self.tokens[request_id] += tokens
        if len(output) > 5 and output[5] is not None:
            self.last[request_id] = output

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self) -> FakeFrontEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


REQUEST_FIELDS = (
    "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time",
    "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds", "prompt_is_token_ids",
    "client_index", "current_wave", "priority", "trace_headers", "resumable", "external_req_id",
    "reasoning_ended", "reasoning_parser_kwargs", "abort_immediately", "session_id", "kv_hints",
)  # fmt: skip


def receive(socket: zmq.Socket[bytes], timeout_ms: int = TIMEOUT_MS) -> list[bytes]:
    assert socket.poll(timeout_ms), f"nothing came within {timeout_ms} ms"
    return socket.recv_multipart()


def check_envelope(envelope: Any) -> None:
    """What makes vLLM's Rust front end stop for good is an error here."""
    assert isinstance(envelope, list) and 4 <= len(envelope) <= 9, envelope
    engine_index, outputs, stats, timestamp, utility, finished, wave_complete, start_wave = (
        envelope + [None] * (8 - len(envelope))
    )[:8]
    assert isinstance(engine_index, int) and isinstance(outputs, list) and isinstance(timestamp, float)
    families = [bool(outputs or stats is not None or finished), utility is not None]
    families += [wave_complete is not None, start_wave is not None]
    assert sum(families) == 1, f"an empty or mixed envelope: {envelope}"
    for output in outputs:
        assert isinstance(output, list) and 2 <= len(output) <= 19
        assert isinstance(output[0], str) and all(isinstance(token, int) for token in output[1])
        assert len(output) <= 13 or isinstance(output[13], int), "num_nans_in_logits must be a number"
        assert len(output) <= 5 or output[5] in (None, 0, 1, 2, 3, 4)
    if stats is not None:
        assert stats.keys() >= STATS_KEYS
