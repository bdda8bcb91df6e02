from __future__ import annotations

import pytest

from engine_core.config import ConfigError, EngineConfig


def test_defaults_are_valid() -> None:
    EngineConfig().validate()
    EngineConfig().validate(max_model_len=1 << 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("max_num_seqs", True),
        ("max_num_seqs", 4096),  # above max_num_batched_tokens
        ("max_num_active_seqs", 257),
        ("max_num_batched_tokens", 255),
        ("max_num_scheduled_tokens", 2049),
        ("max_num_scheduled_tokens", 0),
        ("max_model_len", 0),
        ("block_size", 0),
        ("num_gpu_blocks_override", 1),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("scheduling_policy", "lifo"),
        ("prefix_caching_hash_algo", "md5"),
        ("tensor_parallel_size", -1),
        ("distributed_executor_backend", "ray"),
        ("worker_cls", "not a class"),
        ("shutdown_timeout", -1.0),
        ("stop_grace_s", float("inf")),
        ("seed", 1 << 64),
        ("max_num_seqs", 10**11),
        ("max_num_queued_reqs", -1),
        ("worker_options", {"weights": "x" * 100_000}),
    ],
)
def test_a_bad_value_is_named_with_its_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{field: value}).validate()  # type: ignore[arg-type]
    error = caught.value
    blamed = {"max_num_seqs": {"max_num_seqs", "max_num_batched_tokens"}}.get(field, {field})
    assert error.field in blamed
    assert error.field in str(error) and repr(error.value) in str(error) and error.reason


def test_limits_that_depend_on_the_model_are_checked_once_it_is_known() -> None:
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=2048)
    config.validate()
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        config.validate(max_model_len=4096)
    config = EngineConfig(enable_chunked_prefill=False, max_num_scheduled_tokens=1024)
    with pytest.raises(ConfigError, match="max_num_scheduled_tokens = 1024: must be at least max_model_len"):
        config.validate(max_model_len=2048)
    with pytest.raises(ConfigError, match="long_prefill_token_threshold"):
        EngineConfig(long_prefill_token_threshold=100, max_model_len=64).validate()


def test_one_process_cannot_hold_two_ranks() -> None:
    with pytest.raises(ConfigError, match="use mp"):
        EngineConfig(distributed_executor_backend="uni", tensor_parallel_size=2).validate()


def test_survives_the_way_to_a_launched_engine() -> None:
    config = EngineConfig(max_num_seqs=7, worker_options={"mock_step_ms": 1.5, "nested": {"a": [1, None]}})
    assert EngineConfig.from_msgpack(config.to_msgpack()) == config


def test_the_executor_is_told_what_it_needs() -> None:
    config = EngineConfig(
        model="m", tensor_parallel_size=2, num_gpu_blocks_override=99, worker_options={"x": 1}, seed=5
    ).executor_config()
    assert (config.model, config.tensor_parallel_size, config.num_gpu_blocks) == ("m", 2, 99)
    assert (config.worker_options, config.seed) == ({"x": 1}, 5)
