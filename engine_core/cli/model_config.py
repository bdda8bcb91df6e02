"""What the mock worker takes from a model's directory, so that a front end with that model's tokenizer fits
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_core.config import ConfigError


def mock_options(model: str) -> dict[str, Any]:
    """Worker options for the mock from `<model>/config.json`; empty if there is no such file.

    Raises ConfigError for a file that cannot be read, and for a path that leads nowhere.
    """
    if model.startswith(("/", "./", "../")) and not Path(model).exists():  # and no name on a hub
        raise ConfigError("model", model, "there is no such directory")
    path = Path(model) / "config.json"
    if not model or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
        text = config.get("text_config", config)  # multi-modal models nest it
        found = {
            "vocab_size": text.get("vocab_size"),
            "mock_max_model_len": text.get("max_position_embeddings"),
        }
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("model", model, f"{path} cannot be read: {error}") from None
    return {name: value for name, value in found.items() if isinstance(value, int)}
