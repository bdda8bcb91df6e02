"""`python -m engine_core.launched FD`: the engine process that a client launches.

FD is one end of a socket pair. The client says on it what to run (`Launch`), hears of the engine's start or
failure, and holds it open: the engine ends when it closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys

from engine_core import logs
from engine_core.config import EngineConfig
from engine_core.errors import ProtocolError
from engine_core.lobby_protocol import MAX_MESSAGE_BYTES, Ended, Launch, MessageReader, frame
from engine_core.proc import Serving, first_cause, run_engine
from executor.errors import ExecutorError

LAUNCH_TIMEOUT_S = 30.0


def main() -> int:
    launcher = socket.socket(fileno=int(sys.argv[1]))
    if sys.stdout is not None and sys.stderr is not None:
        os.dup2(2, 1)  # standard output is the launcher's; a worker that prints must not write into it
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    launcher.settimeout(LAUNCH_TIMEOUT_S)
    try:
        launch = _read_launch(launcher)
    except (OSError, ProtocolError) as error:
        print(f"engine-core: the launcher did not say what to run: {error}", file=sys.stderr)
        return 1
    sys.path[:] = launch.sys_path or sys.path
    logs.configure(launch.log_level)
    serving: list[Serving] = []
    try:
        config = EngineConfig.from_msgpack(launch.config)
        logs.configure(launch.log_level, config.log_format)
        return run_engine(config, lobby_address=launch.lobby, launcher=launcher, on_serving=serving.append)
    except Exception as error:
        # The lobby has told the launcher, unless there was none yet.
        with contextlib.suppress(OSError):
            launcher.sendall(frame(Ended(first_cause(error), crashed=True)))
        # Why a start fails is for the launcher to say, once.
        level = logging.ERROR if serving else logging.DEBUG
        if isinstance(error, ExecutorError):
            logging.getLogger("engine_core").log(level, "the engine failed: %s", error.report())
        else:
            logging.getLogger("engine_core").log(level, "the engine failed", exc_info=True)
        return 1


def _read_launch(launcher: socket.socket) -> Launch:
    """Reads not a byte further: the rest of the stream is the lobby's."""
    head = _read_exactly(launcher, 4)
    (length,) = struct.unpack(">I", head)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"its message has {length} bytes")
    (message,) = MessageReader().feed(head + _read_exactly(launcher, length))
    if not isinstance(message, Launch):
        raise ProtocolError(f"it said {type(message).__name__.lower()}")
    return message


def _read_exactly(launcher: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = launcher.recv(count - len(data))
        if not part:
            raise ProtocolError("it is gone")
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
