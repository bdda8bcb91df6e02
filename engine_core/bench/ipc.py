"""How fast messages go from the engine to its workers and back, on this machine.

Prints one line for each case, medians over interleaved repeats, every process on a core of its own as far
as there are cores. With --peers, also what is installed of vLLM, iceoryx2, pyzmq and multiprocessing, each
in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from engine_core.bench.ipc_cell import Cell
from engine_core.bench.ipc_transports import installed_peers
from transport.ring import ShmRingBuffer

_OURS = "engine-core"
_CELL_TIMEOUT_S = 180.0
_KIB, _MIB = 1 << 10, 1 << 20


class Case(msgspec.Struct):
    """A line of the table: a cell, which figure of it counts, and whether more of it is better."""

    title: str
    cell: Cell
    figure: str = "p50_us"
    unit: str = "us"
    only_ours: bool = False
    repeats: int = 3

    @property
    def more_is_better(self) -> bool:
        return self.figure == "per_s"


def _cases() -> list[Case]:
    def latency(
        title: str, size: int, n: int = 1, gap_s: float = 0.0, samples: int = 2000, repeats: int = 3
    ) -> Case:
        cell = Cell(kind="latency", size=size, n_readers=n, gap_s=gap_s, samples=samples)
        return Case(title, cell, repeats=repeats)

    def step(title: str, step: str, n: int) -> Case:
        return Case(title, Cell(kind="latency", step=step, n_readers=n, samples=1000))

    def executor(title: str, method: str) -> Case:
        return Case(title, Cell(kind="executor", method=method, samples=2000), only_ours=True)

    return [
        latency("64 B, reader hot, 1 to 1", 64),
        latency("64 KiB, reader hot, 1 to 1", 64 * _KIB),
        latency("1 MiB, reader hot, 1 to 1", _MIB, samples=500),
        latency("64 B, 1 to 4", 64, 4),
        latency("1 MiB, 1 to 4", _MIB, 4, samples=300),
        Case("64 B, message rate", Cell(kind="rate", size=64, samples=20_000), "per_s", "msg/s"),
        latency("64 B, one each 50 ms", 64, gap_s=0.05, samples=60),
        latency("64 B, one each 1.5 s", 64, gap_s=1.5, samples=6, repeats=2),
        Case(
            "idle reader, one each 50 ms, CPU",
            Cell(kind="latency", size=64, gap_s=0.05, samples=60),
            "reader_cpu_percent",
            "% of a core",
        ),
        step("decode step of 256, encode to decode, 1 to 1", "decode", 1),
        step("decode step of 256, encode to decode, 1 to 2", "decode", 2),
        step("mixed step, 32 new of 512 tokens, 1 to 1", "mixed", 1),
        step("mixed step, 32 new of 512 tokens, 1 to 2", "mixed", 2),
        executor("MultiprocExecutor, 2 ranks: collective_rpc", "check_health"),
        executor("MultiprocExecutor, 2 ranks: execute_model of 256", "execute_model"),
        Case("create and attach 4 readers", Cell(kind="attach", n_readers=4), only_ours=True),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="also measure what is installed of the others, all in this interpreter (default: its own)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT")
    parser.add_argument("--quick", action="store_true", help="one short repeat of each case")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Status 1 if a case of ours failed."""
    if args.peers and os.path.abspath(args.peers) != os.path.abspath(sys.executable):
        return _run_in(args)
    names = [_OURS, *(installed_peers() if args.peers else [])]
    cases = [case for case in _cases() if args.only in case.title]
    if not cases:
        raise ValueError(f"--only {args.only}: no case has that in its name")
    rows = []
    for case in cases:
        row = _measure(case, names, quick=args.quick)
        rows.append(row)
        if not args.json:
            print(
                _line(row, names) if len(rows) > 1 else f"{_heading(names)}\n{_line(row, names)}", flush=True
            )
    memory_bytes = _ring_bytes()
    if args.json:
        print(
            json.dumps({"machine": _machine(), "queue_memory_bytes": memory_bytes, "cases": rows}, indent=1)
        )
    else:
        print(f"memory of a queue with 4 readers: {memory_bytes / _MIB:.1f} MiB, 0 in /dev/shm")
    return int(any("error" in row["results"][_OURS] for row in rows))


def _run_in(args: argparse.Namespace) -> int:
    """Measure all in the peers' interpreter, so that only the transports differ."""
    command = [args.peers, "-m", "engine_core.cli", "bench", "ipc", "--peers", "--only", args.only]
    command += [flag for flag, wanted in (("--quick", args.quick), ("--json", args.json)) if wanted]
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def _measure(case: Case, names: list[str], *, quick: bool) -> dict[str, Any]:
    """Each transport in turn, `repeats` times; the median of the repeats."""
    here = [name for name in names if name == _OURS or not case.only_ours]
    found: dict[str, list[float]] = {name: [] for name in here}
    errors: dict[str, str] = {}
    cell = case.cell
    if quick:
        cell = msgspec.structs.replace(cell, samples=max(cell.samples // 10, 3))
    for _ in range(1 if quick else case.repeats):
        for name in here:
            result = _run_cell(msgspec.structs.replace(cell, transport=name))
            if "error" in result:
                errors[name] = result["error"]
            else:
                found[name].append(result[case.figure])
    results: dict[str, Any] = {}
    for name in here:
        if found[name]:
            results[name] = {"value": statistics.median(found[name]), "repeats": found[name]}
        else:
            results[name] = {"error": errors[name]}
    ours = results[_OURS].get("value")
    for name in here[1:]:
        theirs = results[name].get("value")
        if ours and theirs:
            results[name]["ratio"] = ours / theirs if case.more_is_better else theirs / ours
    return {"case": case.title, "unit": case.unit, "results": results}


def _run_cell(cell: Cell) -> dict[str, Any]:
    command = [sys.executable, "-m", "engine_core.bench.ipc_cell", msgspec.json.encode(cell).decode()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=_CELL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {_CELL_TIMEOUT_S:g} s"}
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    lines = output.splitlines()
    if not lines:
        return {
            "error": errors.decode(errors="replace").strip().rpartition("\n")[2]
            or f"status {process.returncode}"
        }
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _ring_bytes() -> int:
    ring = ShmRingBuffer.create(4, 4 * _MIB)
    size = len(ring.map)
    ring.close()
    return size


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _heading(names: list[str]) -> str:
    peers = "".join(f"{name:>24}" for name in names[1:])
    return f"{'':50}{_OURS:>14} {'':11}{peers}"


def _line(row: dict[str, Any], names: list[str]) -> str:
    results = row["results"]
    text = f"{row['case']:50}{_number(results[_OURS]):>14} {row['unit']:11}"
    for name in names[1:]:
        result = results.get(name)
        ratio = f" ({result['ratio']:.1f}x)" if result is not None and "ratio" in result else ""
        text += f"{(_number(result) if result is not None else '-') + ratio:>24}"
    for name, result in results.items():
        if "error" in result:
            text += f"\n    {name}: {result['error']}"
    return text


def _number(result: dict[str, Any]) -> str:
    value = result.get("value")
    if value is None:
        return "failed"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
