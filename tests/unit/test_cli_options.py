from __future__ import annotations

import msgspec
import pytest

from engine_core.cli.model_config import mock_options
from engine_core.cli.options import add_engine_options, engine_config, flag, given
from engine_core.cli.parser import Parser, integer
from engine_core.config import ConfigError, EngineConfig


def _parse(*argv: str) -> EngineConfig:
    parser = Parser(prog="test")
    add_engine_options(parser)
    return engine_config(parser, parser.parse_args(list(argv)))


def test_no_flags_give_the_defaults() -> None:
    assert _parse() == EngineConfig()


def test_every_field_has_a_flag_with_help() -> None:
    parser = Parser(prog="test")
    add_engine_options(parser)
    helps = {name: action.help for action in parser._actions for name in action.option_strings}
    for field in msgspec.structs.fields(EngineConfig):
        assert helps[flag(field.name)]
    parser.format_help()


def test_flags_are_vllms() -> None:
    config = _parse(
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "4k", "--max-model-len", "1K", "-tp", "2"),
        *("--no-enable-prefix-caching", "--no-async-scheduling", "--disable-log-stats", "--block-size", "32"),
        *("--scheduling-policy", "priority", "--num-gpu-blocks-override", "100", "--watermark", "0.1"),
        *("--distributed-executor-backend", "mp", "--worker-cls", "a.b:C"),
    )
    assert config == EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=4000,
        max_model_len=1024,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        async_scheduling=False,
        log_stats=False,
        block_size=32,
        scheduling_policy="priority",
        num_gpu_blocks_override=100,
        watermark=0.1,
        distributed_executor_backend="mp",
        worker_cls="a.b:C",
    )


def test_worker_options_come_from_flags_of_their_own_and_by_name() -> None:
    config = _parse(
        *("--mock-step-ms", "2.5", "--vocab-size", "1000"),
        *("--worker-option", "path=/a=b", "--worker-option", "deep=[1, 2]", "--worker-option", "mock_seed=3"),
    )
    assert config.worker_options == {
        "mock_step_ms": 2.5,
        "vocab_size": 1000,
        "path": "/a=b",
        "deep": [1, 2],
        "mock_seed": 3,
    }


def test_only_what_the_user_set_counts_as_given() -> None:
    parser = Parser(prog="test")
    add_engine_options(parser)
    args = parser.parse_args(["--max-num-seqs", "256"])
    assert given(args) == {"max_num_seqs": 256}
    assert engine_config(parser, args, max_num_seqs=3, block_size=8) == EngineConfig(
        max_num_seqs=256, block_size=8
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-num-seqs", "zero"], ["--max-num-seqs", "zero"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "0"]),
        (["--max-num-seqs", "4096"], ["--max-num-batched-tokens", "4096"]),
        (["--scheduling-policy", "lifo"], ["--scheduling-policy", "lifo"]),
        (["--max-num", "3"], ["--max-num"]),
        (["--worker-option", "x"], ["--worker-option", "x"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--watermark", "2"], ["--watermark", "2"]),
        (["--num-gpu-blocks-override"], ["--num-gpu-blocks-override"]),
    ],
)
def test_wrong_usage_is_one_line_that_names_flag_and_value(
    argv: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse(*argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in named:
        assert part in error


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("-1", -1), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2 << 20)]
)
def test_numbers_may_have_vllms_suffixes(text: str, value: int) -> None:
    assert integer(text) == value


def test_a_path_to_no_model_is_told_from_a_name_on_a_hub() -> None:
    assert mock_options("org/model") == {}
    with pytest.raises(ConfigError, match="model = '/nowhere': there is no such directory"):
        mock_options("/nowhere")
