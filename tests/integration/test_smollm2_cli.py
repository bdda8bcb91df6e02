"""The terminal: chat, text in and out, and the directory for a front end."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.smollm2 import needs_model, reference

pytestmark = [needs_model, pytest.mark.timeout(120)]

RECORDS = {record["name"]: record for record in reference()}


def test_chat_answers_from_a_pipe_and_remembers_the_conversation(run_cli: Any) -> None:
    questions = "What is the capital of France?\nAnd of Italy?\n"
    done = run_cli("chat", "--temperature", 0, "--max-tokens", 20, input=questions, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "Paris" in first and "Rome" in second
    assert done.stderr == ""


def test_generate_text_continues_it_as_the_reference_does(run_cli: Any) -> None:
    record = RECORDS["capital"]
    done = run_cli("generate", "--text", "--json", "--max-tokens", 8, record["text"], timeout=100)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == record["output_token_ids"][:8]
    assert record["output_text"].startswith(answer["text"]) and answer["text"].startswith(" Paris")


def test_an_exported_directory_holds_what_a_front_end_wants(run_cli: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    directory = tmp_path / "new" / "model"
    for _ in range(2):
        assert run_cli("export-model-dir", directory).returncode == 0
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 49152
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "<|im_start|>" in json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    theirs = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for record in RECORDS.values():
        assert theirs.encode(record["text"], add_special_tokens=False).ids == record["prompt_token_ids"]
    assert (directory / "model.gguf").stat().st_size > 90_000_000


def test_a_missing_model_is_one_line(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("chat", "--model", tmp_path / "absent.gguf", input="")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "absent.gguf: cannot be read" in done.stderr


class Terminal:
    """`engine-core chat` on a terminal, where it is in the foreground."""

    def __init__(self, *args: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "engine_core.cli", "chat", *args]
            os.execve(sys.executable, command, {**os.environ, "TERM": "dumb"})
        self.seen = ""

    def wait_for(self, text: str, timeout_s: float = 40.0) -> None:
        assert self.shows(text, timeout_s), f"{text!r} did not come; the terminal shows {self.seen!r}"

    def shows(self, text: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while text not in self.seen and (left := deadline - time.monotonic()) > 0:
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:  # the other side is closed
                    raise AssertionError(f"chat ended; the terminal shows {self.seen!r}") from None
        return text in self.seen

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.master, text.encode())

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    chat = Terminal("--temperature", "0", "--max-tokens", "400")
    try:
        chat.wait_for("> ")
        chat.type("Write a very long story about a lighthouse.\n")
        chat.wait_for("lighthouse.\r\n")
        chat.seen = ""
        chat.wait_for("light")  # it has begun to answer
        chat.type("\x03")
        chat.wait_for("> ")
        chat.type("/clear\n")
        chat.wait_for("> ")
        # At the prompt: nothing but a new line. CPython's input() shows the prompt a moment before a signal
        # can end its wait for a key, so press it again like anybody would.
        for _ in range(20):
            chat.type("\x03")
            if chat.shows("> ", timeout_s=2.0):
                break
        else:
            raise AssertionError("Ctrl-C at the prompt brings no new one")
        chat.type("What is the capital of France?\n")
        chat.wait_for("Paris")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.exit_code() == 0
    except BaseException:
        os.kill(chat.pid, signal.SIGKILL)
        os.waitpid(chat.pid, 0)
        raise
    finally:
        os.close(chat.master)
