"""`python -m tests.fuzz.run [SECONDS]`: all targets one after the other, guided by coverage (atheris).

Inputs that break something are kept as crash-* in the current directory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

DEFAULT_SECONDS = 60


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--target":
        return fuzz(sys.argv[2], sys.argv[3:])
    from tests.fuzz.targets import SEEDS, TARGETS

    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_SECONDS
    status = 0
    for name in TARGETS:
        with tempfile.TemporaryDirectory(prefix="corpus-") as corpus:
            for i, seed in enumerate(SEEDS[name]):
                (Path(corpus) / str(i)).write_bytes(seed)
            options = [f"-max_total_time={max(1, seconds // len(TARGETS))}", "-rss_limit_mb=1024", corpus]
            command = [sys.executable, "-m", "tests.fuzz.run", "--target", name, *options]
            print(f"--- {name}", flush=True)
            status |= subprocess.run(command).returncode
    return status


def fuzz(name: str, options: list[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=["engine_core", "executor", "transport"]):
        from tests.fuzz.targets import TARGETS

    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
