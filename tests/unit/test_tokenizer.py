"""SmolLM2's tokenizer and chat template, as transformers reads them from the same file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.smollm2 import REFERENCE, needs_model, reference

pytestmark = needs_model

PROMPTS = {prompt["name"]: prompt for prompt in json.loads((REFERENCE / "prompts.json").read_text())}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    from engine_core_smollm2.gguf_file import open_model
    from engine_core_smollm2.tokenizer import Tokenizer

    yield Tokenizer(open_model())


@pytest.mark.parametrize("record", reference(), ids=lambda record: record["name"])
def test_text_and_ids_are_the_reference(record: dict[str, Any], tokenizer: Any) -> None:
    prompt = PROMPTS[record["name"]]
    text = tokenizer.chat(prompt["chat"]) if "chat" in prompt else prompt["text"]
    assert text == record["text"]
    assert tokenizer.encode(text) == record["prompt_token_ids"]
    assert tokenizer.decode(record["output_token_ids"]) == record["output_text"].replace("<|im_end|>", "")


# The vocabulary has no token for some control characters and rare planes; transformers drops those too.
COMMON = st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"])


@settings(deadline=None)
@given(text=st.text(COMMON))
def test_text_survives_the_way_through_the_ids(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    assert len(tokenizer.encode("1234567")) == 7


def test_a_character_is_shown_when_its_last_byte_has_come(tokenizer: Any) -> None:
    from engine_core_smollm2.tokenizer import TextStream

    ids = tokenizer.encode("🍕")
    assert len(ids) > 1
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in ids] == [""] * (len(ids) - 1) + ["🍕"]
    assert stream.end() == ""
    stream = TextStream(tokenizer)
    assert stream.add(ids[0]) == "" and stream.end() == "\ufffd"


def test_control_tokens_are_read_but_not_shown(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([504, 2]) == "The"


def test_a_refusing_template_is_an_error_of_the_messages(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="no system role"):
        tokenizer.chat([{"role": "system", "content": ""}])
