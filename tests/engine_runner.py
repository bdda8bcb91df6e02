"""`python -m tests.engine_runner CONFIG FRONT_END LOBBY`, each JSON: one engine, as a launcher runs it.

Says "serving" on standard output once it serves.
"""

from __future__ import annotations

import sys

import msgspec

from engine_core import logs
from engine_core.config import EngineConfig
from engine_core.handshake import FrontEnd
from engine_core.proc import Serving, first_cause, run_engine


def main() -> int:
    config, front_end, lobby = (
        msgspec.json.decode(text, type=kind)
        for text, kind in zip(sys.argv[1:4], (EngineConfig, FrontEnd | None, str | None), strict=True)
    )
    logs.configure("INFO")

    def on_serving(serving: Serving) -> None:
        print(f"serving {serving.lobby}", flush=True)

    try:
        return run_engine(config, front_end=front_end, lobby_address=lobby, on_serving=on_serving)
    except Exception as error:
        print(f"failed: {first_cause(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
