from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.cli import main, run_command
from engine_core.cli.messages import describe
from engine_core.cli.model_config import mock_options
from engine_core.cli.parser import Parser
from engine_core.config import ConfigError


@pytest.mark.parametrize(
    ("argv", "status", "named"),
    [
        ([], 2, "serve"),
        (["nonsense"], 2, "nonsense"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["replay"], 2, "TRACE"),
        (["replay", "x", "--speed", "0"], 2, "--speed"),
        (["replay", "x", "--speed", "fast"], 2, "fast"),
        (["generate", "1", "two"], 2, "two"),
        (["generate", "1", "--max-tokens", "0"], 2, "--max-tokens"),
        (["serve", "--data-parallel-rpc-port", "99999"], 2, "99999"),
        (["serve", "--log-level", "loud"], 2, "loud"),
        (["replay", "/nowhere/trace.jsonl"], 1, "/nowhere/trace.jsonl: No such file"),
        (["generate", "--prompt-file", "/nowhere/prompts"], 1, "/nowhere/prompts: No such file"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_status(
    argv: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(argv)
    except SystemExit as exit_:
        ended = int(exit_.code or 0)
    out, err = capsys.readouterr()
    assert (ended, out) == (status, "")
    assert err.count("\n") == 1 and named in err and err.startswith("engine-core")


def test_version_is_printed_without_loading_the_engine() -> None:
    code = (
        "import sys; from engine_core.cli import main\n"
        "try: main(['--version'])\n"
        "finally: print(sorted({'zmq', 'numpy', 'uvloop'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.stdout.splitlines()[0].startswith("engine-core ")
    assert result.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize("command", ["serve", "generate", "replay"])
def test_help_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--max-num-seqs" in text and "(default: 256)" in text and "--log-level" in text


def _run(error: BaseException, *argv: str) -> int:
    def fail(parser: Parser, args: object) -> int:
        raise error

    parser = Parser(prog="test")
    parser.add_argument("--log-level", default="info")
    return run_command(fail, parser, parser.parse_args(list(argv)))


def test_an_interrupt_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_a_command_is_imported_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_a_failure_is_one_line_unless_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(RuntimeError("rank 1 has died\nits last words")) == 1
    assert capsys.readouterr().err == "test: rank 1 has died (--debug shows more)\n"
    assert _run(RuntimeError("rank 1 has died"), "--log-level", "debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_errors_are_described_in_one_line() -> None:
    assert (
        describe(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    )
    assert describe(ValueError()) == "ValueError"


def test_the_mock_takes_its_limits_from_a_model_directory(tmp_path: Path) -> None:
    assert mock_options("") == {} and mock_options(str(tmp_path)) == {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 9, "max_position_embeddings": 77, "hidden_size": 1}))
    assert mock_options(str(tmp_path)) == {"vocab_size": 9, "mock_max_model_len": 77}
    path.write_text(json.dumps({"text_config": {"vocab_size": 5}}))
    assert mock_options(str(tmp_path)) == {"vocab_size": 5}
    path.write_text("[")
    with pytest.raises(ConfigError, match="config"):
        mock_options(str(tmp_path))
