"""vLLM's Rust front end on our engine: dialled by `engine-core serve`, and starting `engine-core-vllm`
itself.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executor.mock_model import mock_tokens
from tests import vllm_rs
from tests.vllm_rs import Model, Server

PROMPT = [263, 278, 81, 281, 500, 501, 502]


@pytest.fixture(scope="module", params=["external", "managed"])
def server(
    request: pytest.FixtureRequest, vllm_model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    start = {"external": vllm_rs.serve_external, "managed": vllm_rs.serve_managed}[request.param]
    with start(
        vllm_model, tmp_path_factory.mktemp(request.param), ["--tensor-parallel-size", "2"]
    ) as running:
        yield running


def _expected(server: Server, prompt: list[int], n: int) -> list[int]:
    tokens: list[int] = mock_tokens(prompt, n, server.model.vocab_size).tolist()
    return tokens


def test_a_prompt_of_ids_gets_exactly_the_mocks_tokens(server: Server) -> None:
    answer = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=40, ignore_eos=True, return_token_ids=True
    )
    choice = answer["choices"][0]
    assert choice["token_ids"] == _expected(server, PROMPT, 40)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": len(PROMPT), "completion_tokens": 40}


def test_a_prompt_of_text_is_tokenised_and_answered_as_text(server: Server) -> None:
    text = "Licensed under the Apache License"
    ids = server.model.tokenizer.encode(text).ids
    answer = server.post(
        "/v1/completions", prompt=text, max_tokens=12, ignore_eos=True, return_token_ids=True
    )
    expected = _expected(server, ids, 12)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["choices"][0]["text"] == server.model.tokenizer.decode(expected)


def test_requests_at_the_same_time_get_each_their_own_tokens(server: Server) -> None:
    prompts = [[seed, seed + 1, seed * 7 % 1000] * (seed + 1) for seed in range(16)]

    def ask(prompt: list[int]) -> list[int]:
        answer = server.post(
            "/v1/completions", prompt=prompt, max_tokens=25, ignore_eos=True, return_token_ids=True
        )
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [_expected(server, prompt, 25) for prompt in prompts]


def test_tokens_are_streamed_as_they_come(server: Server) -> None:
    chunks = list(
        server.stream(
            "/v1/completions",
            prompt=PROMPT,
            max_tokens=30,
            ignore_eos=True,
            return_token_ids=True,
            stream_options={"include_usage": True},
        )
    )
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for part in parts for token in part.get("token_ids") or []]
    assert ids == _expected(server, PROMPT, 30)
    assert sum(bool(part.get("token_ids")) for part in parts) > 10
    assert parts[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 30


def test_logprobs_of_samples_and_prompt(server: Server) -> None:
    answer = server.post(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=4,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=1,
        return_tokens_as_token_ids=True,
    )
    choice = answer["choices"][0]
    tokens = _expected(server, PROMPT, 4)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    # The mock's likeliest token has probability 1/2, the next 1/4, ...
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([-math.log(2)] * 4)
    for token, top in zip(tokens, choice["logprobs"]["top_logprobs"], strict=True):
        likeliest = [(token + distance) % server.model.vocab_size for distance in range(3)]
        assert top == {
            f"token_id:{other}": pytest.approx(-(rank + 1) * math.log(2))
            for rank, other in enumerate(likeliest)
        }
    of_prompt = choice["prompt_logprobs"]
    assert of_prompt[0] is None and len(of_prompt) == len(PROMPT)
    for token, row in zip(PROMPT[1:], of_prompt[1:], strict=True):
        assert str(token) in row


def test_a_stop_token_ends_the_answer_and_is_named(server: Server) -> None:
    tokens = _expected(server, PROMPT, 40)
    stop = tokens[5]
    answer = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=[stop]
    )
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == tokens.index(stop) + 1


def test_eos_ends_the_answer(server: Server) -> None:
    eos = server.model.eos_token_id
    prompt, at = next(
        (prompt, tokens.index(eos))
        for prompt in ([first, 5, 6] for first in range(server.model.vocab_size))
        if eos in (tokens := _expected(server, prompt, 20))
    )
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=30)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == at + 1


def test_a_stop_string_cuts_the_text(server: Server) -> None:
    def text_of(prompt: list[int]) -> str:
        text: str = server.model.tokenizer.decode(_expected(server, prompt, 12))
        return text

    # Random tokens of a byte-level vocabulary are seldom all text.
    prompt = next(p for p in ([first, 5] for first in range(1000)) if text_of(p).isascii())
    text = text_of(prompt)
    at = next(i for i in range(5, len(text)) if text.find(text[i : i + 3]) == i)
    stop = text[at : at + 3]
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=100, ignore_eos=True, stop=[stop])
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:at], "stop", stop)
    assert answer["usage"]["completion_tokens"] <= 12


def test_chat(server: Server) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.post("/v1/chat/completions", **body)
    prompt = server.model.tokenizer.encode(
        "<s><|user|>Say something.<|assistant|>", add_special_tokens=False
    ).ids
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["token_ids"] == _expected(server, prompt, 8)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    chunks = list(server.stream("/v1/chat/completions", **body))
    ids = [
        token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []
    ]
    assert ids == _expected(server, prompt, 8)


def test_a_prompt_that_is_too_long_is_refused_alone(server: Server) -> None:
    status, answer = server.request(
        "POST",
        "/v1/completions",
        {"model": str(server.model.path), "prompt": [5] * 5000, "max_tokens": 1},
    )
    assert status == 400, answer
    assert server.post("/v1/completions", prompt=PROMPT, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_what_the_engine_counts_reaches_the_metrics(server: Server) -> None:
    prompt = list(range(100, 200))
    for _ in range(2):
        server.post("/v1/completions", prompt=prompt, max_tokens=4, ignore_eos=True)
    server.wait_until(lambda: server.metric("vllm:prefix_cache_hits_total") >= 96, "prefix hits in /metrics")
    assert server.metric("vllm:generation_tokens_total") >= 8


@pytest.mark.timeout(90)
def test_bench_serve_completes_200_of_200(server: Server) -> None:
    command = [
        *(str(vllm_rs.binary()), "bench", "serve", "--backend", "openai", "--port", str(server.port)),
        *("--model", str(server.model.path), "--dataset-name", "random", "--random-input-len", "64"),
        *("--random-output-len", "32", "--num-prompts", "200", "--max-concurrency", "32", "--ignore-eos"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=80)
    lines = (result.stdout + result.stderr).splitlines()
    figures = dict(
        line.rsplit(":", 1) for line in lines if line.startswith(("Successful", "Failed", "Total gen"))
    )
    assert int(figures["Successful requests"].strip() or 0) == 200, result.stdout + result.stderr
    assert int(figures["Total generated tokens"].strip()) == 200 * 32


def test_a_client_that_disconnects_frees_its_seat(vllm_model: Model, tmp_path: Path) -> None:
    slow = ["--max-num-seqs", "1", "--mock-step-ms", "20"]
    with vllm_rs.serve_external(vllm_model, tmp_path, slow) as server:
        stream = server.stream("/v1/completions", prompt=PROMPT, max_tokens=4000, ignore_eos=True)  # 80 s
        next(stream)
        with contextlib.closing(stream):
            pass
        # With one seat, this is answered only once the request above is out of the engine.
        answer = server.post(
            "/v1/completions", prompt=PROMPT[:3], max_tokens=3, ignore_eos=True, return_token_ids=True
        )
        assert answer["choices"][0]["token_ids"] == _expected(server, PROMPT[:3], 3)


def test_options_of_the_front_end_are_ignored_with_one_warning(vllm_model: Model, tmp_path: Path) -> None:
    theirs = [
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.5",
        "--max_num_seqs=3",
        "--max-model-len",
        "512",
    ]
    with vllm_rs.serve_managed(vllm_model, tmp_path, theirs) as server:
        _, models = server.request("GET", "/v1/models")
        assert models["data"][0]["max_model_len"] == 512
        warnings = [line for line in server.log.read_text().splitlines() if "ignored" in line]
        assert len(warnings) == 1
        assert "--enforce-eager" in warnings[0] and "--gpu-memory-utilization" in warnings[0]
        assert "max-num-seqs" not in warnings[0]


def test_two_engines_behind_one_front_end(vllm_model: Model, tmp_path: Path) -> None:
    with vllm_rs.serve_managed(vllm_model, tmp_path, ["--data-parallel-size", "2"]) as server:
        for first in range(8):
            answer = server.post(
                "/v1/completions", prompt=[first, 5], max_tokens=6, ignore_eos=True, return_token_ids=True
            )
            assert answer["choices"][0]["token_ids"] == _expected(server, [first, 5], 6)
        log = server.log.read_text()
        assert "engine 0 dials" in log and "engine 1 dials" in log
