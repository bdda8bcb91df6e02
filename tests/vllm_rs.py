"""vLLM's Rust front end for tests: the binary, a tiny model directory, and a running server with its engine.

The binary comes from the vllm wheel, which is fetched once into `.cache/` (about 320 MB, of which the 60
MB binary is kept). `ENGINE_CORE_VLLM_RS` may name one that is already there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

ROOT = Path(__file__).parents[1]
VERSION = "0.33.0"
CACHE = ROOT / ".cache" / f"vllm-rs-{VERSION}"


class Unavailable(Exception):
    """The binary cannot be had; says why."""


def binary() -> Path:
    """An executable vllm-rs. Raises `Unavailable`."""
    if given := os.environ.get("ENGINE_CORE_VLLM_RS"):
        if not os.access(given, os.X_OK):
            raise Unavailable(f"ENGINE_CORE_VLLM_RS={given} is not an executable file")
        return Path(given)
    path = CACHE / "vllm-rs"
    if not path.exists():
        _fetch(path)
    return path


def _fetch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            tmp,
            f"vllm=={VERSION}",
        ]
        pip = subprocess.run(command, capture_output=True, text=True, timeout=900)
        wheels = list(Path(tmp).glob("vllm-*.whl"))
        if not wheels:
            raise Unavailable(f"pip could not download vllm=={VERSION}: {pip.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open("vllm/vllm-rs") as source:
            partial = Path(tmp) / "vllm-rs"
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target)
        partial.chmod(0o755)
        partial.replace(path)  # at once: a run beside this one sees all of it or nothing


@dataclass(frozen=True)
class Model:
    """A model directory without weights."""

    path: Path
    vocab_size: int
    eos_token_id: int
    tokenizer: Tokenizer


def make_model(path: Path, *, vocab_size: int = 1000, max_model_len: int = 4096) -> Model:
    """Writes configuration, a byte-level BPE tokenizer trained on this repository's licence, and a chat
    template."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(ROOT / "LICENSE").read_text()], trainer)
    size = tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id("</s>")
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": max_model_len,
            "bos_token_id": tokenizer.token_to_id("<s>"),
            "eos_token_id": eos,
            "torch_dtype": "float32",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": max_model_len,
            "chat_template": "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
            "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        },
        "generation_config.json": {"eos_token_id": eos},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return Model(path, size, eos, tokenizer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running vllm-rs with an engine behind it."""

    def __init__(self, pid: int, port: int, model: Model, log: Path) -> None:
        self.pid = pid
        self.port = port
        self.model = model
        self.log = log

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and decoded body (text if it is not JSON)."""
        with self._open(method, path, body) as response:
            text = response.read().decode()
        try:
            return response.status, json.loads(text)
        except json.JSONDecodeError:
            return response.status, text

    def post(self, path: str, **body: Any) -> Any:
        """The decoded answer to a request that must succeed."""
        status, answer = self.request("POST", path, {"model": str(self.model.path), **body})
        assert status == 200, (status, answer)
        return answer

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The server-sent events of a streamed answer; closing the iterator drops the connection."""
        body = {"model": str(self.model.path), "stream": True, **body}
        with self._open("POST", path, body) as response:
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Sum of a metric of /metrics over its labels."""
        _, text = self.request("GET", "/metrics")
        lines = [line for line in str(text).splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_until(self, condition: Any, what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what}: not within {timeout_s} s; log:\n{self.log.read_text()}"
            )
            time.sleep(0.05)


@contextlib.contextmanager
def serve_external(model: Model, tmp: Path, engine_args: Sequence[str] = ()) -> Iterator[Server]:
    """vllm-rs, and `engine-core serve` dialling it."""
    rpc_port = free_port()
    dial = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port)]
    front_end = ["--data-parallel-size", "1", "--data-parallel-size-local", "0", *dial]
    engine = [sys.executable, "-m", "engine_core.cli", "serve", str(model.path), *dial, *engine_args]
    log = tmp / "engine.log"
    with _process(engine, log), serve_front_end(model, tmp, front_end) as server:
        yield server


@contextlib.contextmanager
def serve_managed(model: Model, tmp: Path, engine_args: Sequence[str] = ()) -> Iterator[Server]:
    """vllm-rs that starts `engine-core-vllm` itself."""
    engine = Path(sys.executable).with_name("engine-core-vllm")
    with serve_front_end(model, tmp, ["--python", str(engine), *engine_args]) as server:
        yield server


@contextlib.contextmanager
def serve_front_end(model: Model, tmp: Path, args: Sequence[str]) -> Iterator[Server]:
    """vllm-rs alone."""
    port = free_port()
    log = tmp / "vllm-rs.log"
    command = [str(binary()), "serve", str(model.path), "--port", str(port), *args]
    with _process(command, log) as process:
        server = Server(process.pid, port, model, log)

        def healthy() -> bool:
            assert process.poll() is None, f"vllm-rs ended with {process.returncode}; log:\n{log.read_text()}"
            with contextlib.suppress(OSError):
                return server.request("GET", "/health")[0] == 200
            return False

        server.wait_until(healthy, "vllm-rs ready", 40.0)
        yield server


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command with its output in a file, and asks it to end on the way out."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
