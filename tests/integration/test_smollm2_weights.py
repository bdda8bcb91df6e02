"""Weights of a real model, changed while it serves: its words change with them, and come back with them."""

from __future__ import annotations

import pytest

from engine_core.client import EngineClient
from engine_core.config import EngineConfig
from engine_core.errors import UtilityError
from tests.smollm2 import WORKER, assert_matches, greedy, needs_model, reference
from transport.state_page import StatePage

pytestmark = [needs_model, pytest.mark.timeout(120)]

NAME = "blk.12.ffn_down.weight"
COUNT = 8


def test_tokens_change_with_a_scaled_matrix_and_return_with_the_old_one() -> None:
    from engine_core_smollm2.gguf_file import open_model

    record = min(reference(), key=lambda record: len(record["prompt_token_ids"]))
    config = EngineConfig(
        worker_cls=WORKER,
        tensor_parallel_size=1,
        distributed_executor_backend="mp",
        max_model_len=512,
        num_gpu_blocks_override=256,
        enable_sleep_mode=True,
    )

    with EngineClient.launch(config) as engine:

        def answer() -> tuple[list[int], set[str | None]]:
            outputs = list(engine.generate(record["prompt_token_ids"], greedy(COUNT)))
            tokens = [token for output in outputs for token in output.new_token_ids]
            return tokens, {output.weight_version for output in outputs}

        original, versions = answer()
        assert_matches(record, original)
        assert versions == {"default"}

        engine.update_weights("scaled", options={"scale": {NAME: 40.0}})
        changed, versions = answer()
        assert changed != original and versions == {"scaled"}

        # What the engine was told is repeated on ranks that take the place of others.
        engine.restore_weights()
        assert answer() == (changed, {"scaled"})

        with pytest.raises(UtilityError, match="there is no tensor nonsense"):
            engine.update_weights("wrong", options={"scale": {"nonsense": 2.0}})
        with StatePage.open(engine.engine_pid) as page:
            assert page.snapshot()["engine"]["weight_status"] == "FAILED"

        engine.update_weights("original", tensors={NAME: open_model().tensor(NAME)})
        assert answer() == (original, {"original"})

        engine.sleep(2)
        engine.wake_up()
        assert answer() == (original, {"original"})
