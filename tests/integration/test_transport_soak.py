"""Twenty seconds of the soak in `benchmarks/ipc_soak.py`."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.transport_peers import ROOT


def test_long_traffic_loses_nothing_and_memory_stays_flat() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/ipc_soak.py", "--seconds", "20", "--readers", "4", "--remote", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
    )
    print(done.stdout, done.stderr)
    assert json.loads(done.stdout.splitlines()[-1])["good"]
    assert done.returncode == 0
