"""`engine-core simulate`: its report, files, sweeps and refusals."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import msgspec
import pytest

from engine_core import cli
from engine_core.lab.metrics import SimulationReport, Slo
from engine_core.lab.sweep import Point, SweepError, knee, parse_sweep
from engine_core.replay.report import Percentiles

TRACE = "tests/data/traces/mooncake_conversation_200.jsonl"
Capsys = pytest.CaptureFixture[str]


def simulate(capsys: Capsys, *args: object) -> str:
    """Standard output of a command that is to succeed."""
    assert cli.main(["simulate", *map(str, args)]) == 0
    return capsys.readouterr().out


def refusal(capsys: Capsys, *args: object) -> str:
    """The one line of a command that is to be refused as wrong usage."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["simulate", *map(str, args)])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_trace_gives_the_report_of_a_replay_and_more(capsys: Capsys) -> None:
    args = (TRACE, "--speed", 4, "--slo-ttft-ms", 3000)
    report = json.loads(simulate(capsys, *args, "--json"))
    assert report["completed"] == report["requests"] == 200
    assert report["prefix_hit_tokens"] == report["prefix_hit_tokens_unbounded"] > 0
    assert 0 < report["good_requests"] < 200
    text = simulate(capsys, *args)
    for name in ("time to first token", "preemptions", "goodput", "KV blocks held"):
        assert name in text


def test_json_is_identical_to_the_byte(capsys: Capsys) -> None:
    args = ("--rate", 30, "--num-requests", 200, "--burstiness", 2, "--seed", 5, "--json")
    assert simulate(capsys, *args) == simulate(capsys, *args)


def test_the_csv_has_a_line_for_each_request(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    simulate(capsys, TRACE, "--max-requests", 20, "--csv", path)
    rows = list(csv.DictReader(path.open()))
    assert sorted(int(row["row"]) for row in rows) == list(range(20))
    assert all(float(row["ttft_ms"]) > 0 for row in rows)


def test_a_full_disk_is_told_with_the_name_of_the_file(capsys: Capsys) -> None:
    assert cli.main(["simulate", TRACE, "--max-requests", "20", "--csv", "/dev/full"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "engine-core simulate: /dev/full: No space left on device"
    )


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_of_a_run_and_of_a_sweep_are_repeatable(capsys: Capsys, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    for name, sweep in (("run", ()), ("sweep", ("--sweep", "rate=5,10,200"))):
        pictures = []
        for number in range(2):
            path = tmp_path / f"{name}{number}{suffix}"
            simulate(capsys, "--rate", 9, "--num-requests", 40, *sweep, "--plot", path)
            pictures.append(path.read_bytes())
        assert pictures[0] == pictures[1]
        assert len(pictures[0]) > 5000


def test_without_matplotlib_a_picture_is_refused_before_the_run(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert r"engine-core[lab]" in refusal(capsys, "--rate", 5, "--plot", "a.png")
    assert "ends in .png or .svg" in refusal(capsys, "--rate", 5, "--plot", "a.gif")


def test_a_sweep_of_an_option_changes_that_option(capsys: Capsys) -> None:
    out = simulate(
        capsys, TRACE, "--max-requests", 80, "--sweep", "num-gpu-blocks-override=8000,200000", "--json"
    )
    points = json.loads(out)["points"]
    assert [point["value"] for point in points] == [8000, 200000]
    assert points[0]["report"]["kv_usage_peak"] > points[1]["report"]["kv_usage_peak"]


def test_a_sweep_of_the_rate_finds_where_the_engine_gives_in(capsys: Capsys) -> None:
    options = ("--num-requests", 300, "--input-length", 2000, "--output-length", 4)
    options += ("--latency", "step_ms=1,prefill_us_per_token=50")  # ten of them a second
    out = simulate(capsys, "--sweep", "rate=2..20..2", *options, "--slo-ttft-ms", 1000, "--json")
    assert json.loads(out)["knee"] in (8, 10)
    assert "knee at" in simulate(capsys, "--sweep", "rate=2..20..2", *options)


def test_two_configurations_are_reported_and_drawn_side_by_side(capsys: Capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = (TRACE, "--max-requests", 60, "--versus", "no cache=--no-enable-prefix-caching")
    reports = json.loads(simulate(capsys, *args, "--plot", tmp_path / "a.svg", "--json"))
    assert list(reports) == ["base", "no cache"]
    assert reports["base"]["prefix_hit_tokens"] > reports["no cache"]["prefix_hit_tokens"] == 0
    assert "no cache" in (tmp_path / "a.svg").read_text()
    args += ("--sweep", "rate=5,9")
    assert "[no cache]" in simulate(capsys, *args, "--plot", tmp_path / "b.svg")


def test_malformed_lines_are_named_and_passed_over_or_refused(capsys: Capsys, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = Path(TRACE).read_text().splitlines()[:5]
    path.write_text("\n".join([*lines[:2], "{broken", *lines[2:]]))
    assert cli.main(["simulate", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "line 3" in err
    assert (json.loads(out)["requests"], json.loads(out)["skipped_lines"]) == (5, 1)
    assert cli.main(["simulate", str(path), "--strict"]) == 1
    assert "line 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((), "--rate"),
        (("--speed", 2, "--rate", 3), "--speed"),
        ((TRACE, "--speed", 2, "--rate", 3), "--speed"),
        ((TRACE, "--sweep", "rate=1", "--csv", "x.csv"), "--csv"),
        ((TRACE, "--versus", "a=--rate 3", "--csv", "x.csv"), "--csv"),
        ((TRACE, "--versus", "a=--no-such-option"), "--no-such-option"),
        ((TRACE, "--versus", "--rate"), "--versus"),
        ((TRACE, "--sweep", "colour=1,2"), "colour"),
        ((TRACE, "--sweep", "max-num-seqs=0.5"), "max-num-seqs"),
        ((TRACE, "--latency", "step_ms=slow"), "step_ms=slow"),
        ((TRACE, "--latency", "nowhere.json"), "nowhere.json"),
        ((TRACE, "--routing", "random"), "random"),
        (("--rate", 1, "--shared-prefix-ratio", 2), "from 0 to 1"),
        (("--rate", 1, "--input-length", "uniform:9"), "uniform:9"),
        ((TRACE, "--mock-jitter", 0.1), "--mock-jitter"),
        ((TRACE, "--record", "x"), "--record"),
    ],
)
def test_wrong_usage_is_one_line_that_names_it(capsys: Capsys, args: tuple[object, ...], reason: str) -> None:
    assert reason in refusal(capsys, *args)


def test_the_mocks_times_are_the_default_latency_model(capsys: Capsys) -> None:
    out = simulate(capsys, "--rate", 5, "--num-requests", 5, "--mock-step-ms", 7, "--json")
    assert json.loads(out)["latency_model"].startswith("step_ms=7,")


def test_sweeps_are_lists_or_ranges() -> None:
    assert parse_sweep("rate=1,2.5") == ("rate", [1, 2.5])
    assert parse_sweep("max_num_seqs=1..4") == ("max-num-seqs", [1, 2, 3, 4])
    assert parse_sweep("rate=0.1..0.5..0.1")[1] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    for text in (
        "rate",
        "rate=",
        "=1",
        "rate=5..1",
        "rate=1..9..0",
        "rate=1..2..3..4",
        "rate=0,1",
        "rate=1..9999",
    ):
        with pytest.raises(SweepError):
            parse_sweep(text)


def _point(
    report: SimulationReport, rate: float, ttft_ms: float, good: int = 0, slo: Slo | None = None
) -> Point:
    spread = Percentiles(ttft_ms, ttft_ms, ttft_ms)
    changed = msgspec.structs.replace(
        report, ttft_ms=spread, good_requests=good, requests=100, slo=slo or Slo()
    )
    return Point(rate, changed)


def test_the_knee_is_where_the_curve_bends_or_where_the_service_level_breaks(capsys: Capsys) -> None:
    out = simulate(capsys, "--rate", 5, "--num-requests", 1, "--json")
    report = msgspec.json.decode(out, type=SimulationReport)
    bend = [_point(report, rate, 10 if rate < 6 else 10 + 90 * (rate - 5)) for rate in range(1, 10)]
    assert knee(bend) == 5
    assert knee([_point(report, rate, 10 + rate) for rate in range(1, 10)]) is None
    slo = Slo(ttft_ms=1.0)
    assert (
        knee([_point(report, rate, 1, good, slo) for rate, good in ((1, 99), (2, 90), (3, 89), (4, 95))]) == 2
    )
    assert knee([_point(report, 1, 1, 5, slo)]) is None
