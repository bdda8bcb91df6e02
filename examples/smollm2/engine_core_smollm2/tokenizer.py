"""Text to token ids and back, by the vocabulary, merges and chat template of a GGUF file."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from .gguf_file import GGUFError, GGUFFile

Message = Mapping[str, str]  # "role" and "content"

_CONTROL, _USER_DEFINED = 3, 4  # token types


class Tokenizer:
    """Byte-level BPE. Raises `GGUFError` for a file with another kind of tokenizer."""

    def __init__(self, file: GGUFFile) -> None:
        meta = file.metadata
        kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or pre not in ("smollm", "default", "gpt-2"):
            raise GGUFError(file.path, f"has a tokenizer of kind '{kind}' ('{pre}'), not SmolLM's or GPT-2's")
        self.tokens: list[str] = meta["tokenizer.ggml.tokens"]
        types: list[int] = meta["tokenizer.ggml.token_type"]
        self.bos_token_id: int | None = meta.get("tokenizer.ggml.bos_token_id")
        self.eos_token_id: int | None = meta.get("tokenizer.ggml.eos_token_id")
        self.chat_template: str | None = meta.get("tokenizer.chat_template")
        self._control = {i for i, type_ in enumerate(types) if type_ == _CONTROL}
        merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
        vocab = {token: i for i, token in enumerate(self.tokens)}
        self._fast = Fast(models.BPE(vocab, merges))
        split_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if pre == "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            self._fast.pre_tokenizer = pre_tokenizers.Sequence([digits, split_bytes])
        else:
            self._fast.pre_tokenizer = split_bytes
        self._fast.decoder = decoders.ByteLevel()
        for i, type_ in enumerate(types):
            if type_ in (_CONTROL, _USER_DEFINED):
                special = type_ == _CONTROL
                self._fast.add_tokens([AddedToken(self.tokens[i], special=special, normalized=False)])
        self._environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._environment.globals["raise_exception"] = _raise_template_error

    def encode(self, text: str) -> list[int]:
        """Control tokens that are spelled out in `text` are taken as such; none is added."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without control tokens; bytes that are no UTF-8 become U+FFFD."""
        stream = TextStream(self)
        return "".join(map(stream.add, token_ids)) + stream.end()

    def bytes_of(self, token_id: int) -> bytes:
        """What the token stands for; nothing for a control token."""
        if token_id in self._control:
            return b""
        token = self.tokens[token_id]
        if any(character not in _BYTES for character in token):  # user-defined: spelled as it is
            return token.encode()
        return bytes(_BYTES[character] for character in token)

    def chat(self, messages: Sequence[Message]) -> str:
        """The conversation as the model was taught to read it, up to where its answer begins.

        Raises ValueError if the file has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template")
        special = {
            name: self.tokens[i]
            for name, i in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id))
            if i is not None
        }
        try:
            template = self._environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **special)
        except TemplateError as error:
            raise ValueError(f"the chat template failed: {error}") from error

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        text: str = self._fast.to_str()
        return text


class TextStream:
    """Text of tokens as they come. A character whose bytes are not complete waits for the next token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """What can be shown now."""
        return self._decoder.decode(self._tokenizer.bytes_of(token_id))

    def end(self) -> str:
        """What is left."""
        return self._decoder.decode(b"", final=True)


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
