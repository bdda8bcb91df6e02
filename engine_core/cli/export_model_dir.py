"""Write a model's directory for a front end: configuration, tokenizer and chat template.

The GGUF file itself is linked into it, so that the engine can be given the same directory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.cli.messages import writing
from engine_core.cli.parser import Parser
from engine_core.cli.text import open_model

if TYPE_CHECKING:
    from engine_core_smollm2.gguf_file import GGUFFile
    from engine_core_smollm2.tokenizer import Tokenizer


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="is made if absent; files in it are replaced"
    )
    parser.add_argument(
        "--model",
        dest="engine:model",
        default="",
        metavar="FILE",
        help="a GGUF file (default: SmolLM2-135M-Instruct)",
    )


def run(parser: Parser, args: argparse.Namespace) -> int:
    file, tokenizer = open_model(parser, args)
    args.directory.mkdir(parents=True, exist_ok=True)
    for name, content in model_files(file, tokenizer).items():
        _write(args.directory / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    _write(args.directory / "tokenizer.json", tokenizer.to_json())
    link = args.directory / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(file.path.resolve())
    print(args.directory)
    return 0


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text)


def model_files(file: GGUFFile, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Hugging Face's configuration files, by name."""
    from engine_core_smollm2.gguf_file import LlamaConfig

    config = LlamaConfig.from_gguf(file)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    names = {
        name.removesuffix("_id"): None if token_id is None else tokenizer.tokens[token_id]
        for name, token_id in special.items()
    }
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "torch_dtype": "float32",
            **special,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": tokenizer.chat_template,
            **names,
        },
        "generation_config.json": special,
    }
