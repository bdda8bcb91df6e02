"""`bench ipc` measures, in a table and as JSON."""

from __future__ import annotations

import argparse
import json

import pytest

from engine_core.bench import ipc


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    ipc.add_arguments(parser)
    return ipc.run(parser.parse_args(arguments))


def test_the_table_has_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick", "--only", "1 MiB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16] for line in lines[1:3]] == ["1 MiB, reader ho", "1 MiB, 1 to 4   "]
    assert "0 in /dev/shm" in lines[3]


def test_json_has_the_values_and_the_peers_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick", "--json", "--peers", "--only", "64 B, reader hot") == 0
    answer = json.loads(capsys.readouterr().out)
    (case,) = answer["cases"]
    assert case["results"]["engine-core"]["value"] > 0
    assert case["results"]["pyzmq"]["ratio"] > 0
    assert answer["queue_memory_bytes"] < 16 << 20


def test_whole_steps_and_the_executor_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for only in ("mixed step, 32 new of 512 tokens, 1 to 1", "execute_model of 256"):
        assert run("--quick", "--json", "--only", only) == 0
        (case,) = json.loads(capsys.readouterr().out)["cases"]
        assert case["results"]["engine-core"]["value"] > 0
