"""vLLM's Rust front end on top of the SmolLM2 engine, used with the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_core.cli import main
from tests import vllm_rs
from tests.smollm2 import EOS, WORKER, assert_matches, needs_model, reference

pytestmark = [needs_model, pytest.mark.timeout(120)]
openai = pytest.importorskip("openai")

RECORDS = {record["name"]: record for record in reference()}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]  # the prompt chat_capital


@pytest.fixture(scope="module")
def server(vllm_model: vllm_rs.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_rs.Server]:
    from tokenizers import Tokenizer

    tmp = tmp_path_factory.mktemp("smollm2")
    assert main(["export-model-dir", str(tmp / "model")]) == 0
    tokenizer = Tokenizer.from_file(str(tmp / "model" / "tokenizer.json"))
    model = vllm_rs.Model(tmp / "model", 49152, EOS, tokenizer)
    with vllm_rs.serve_external(model, tmp, ["--worker-cls", WORKER, "--max-model-len", "2048"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: vllm_rs.Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=60) as client:
        yield client


def test_a_streamed_chat_gives_the_reference_answer_and_usage(server: vllm_rs.Server, client: Any) -> None:
    record = RECORDS["chat_capital"]
    stream = client.chat.completions.create(
        model=str(server.model.path),
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reason, pieces = "", None, None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            pieces += bool(choice.delta.content)
            reason = choice.finish_reason or reason
    assert text == record["output_text"].removesuffix("<|im_end|>")
    assert pieces > 3 and reason == "stop"
    assert usage.prompt_tokens == len(record["prompt_token_ids"])
    assert usage.completion_tokens == len(record["output_token_ids"])


def test_logprobs_of_a_chat_are_the_reference_ones(server: vllm_rs.Server, client: Any) -> None:
    record = RECORDS["chat_capital"]
    answer = client.chat.completions.create(
        model=str(server.model.path),
        messages=QUESTION,
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    for found, step in zip(answer.choices[0].logprobs.content, record["steps"][:5], strict=True):
        assert found.logprob == pytest.approx(step["top"][0][1], abs=1e-3)
        likely = [logprob for _, logprob in step["top"][:3]]
        assert [top.logprob for top in found.top_logprobs] == pytest.approx(likely, abs=1e-3)


def test_a_completion_of_text_and_its_prompt_logprobs(server: vllm_rs.Server) -> None:
    record = RECORDS["capital"]
    answer = server.post(
        "/v1/completions",
        prompt=record["text"],
        temperature=0,
        max_tokens=8,
        prompt_logprobs=1,
        return_token_ids=True,
    )
    choice = answer["choices"][0]
    assert_matches(record, choice["token_ids"])
    for token_id, found, wanted in zip(
        record["prompt_token_ids"][1:],
        choice["prompt_logprobs"][1:],
        record["prompt_logprobs"][1:],
        strict=True,
    ):
        assert found[str(token_id)]["logprob"] == pytest.approx(wanted, abs=1e-3)


def test_a_seed_makes_an_answer_repeatable(server: vllm_rs.Server) -> None:
    def ask(seed: int) -> str:
        answer = server.post(
            "/v1/chat/completions", messages=QUESTION, temperature=1.5, seed=seed, max_tokens=12
        )
        text: str = answer["choices"][0]["message"]["content"]
        return text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1
