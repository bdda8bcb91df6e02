"""Where log records go and how they look: lines for people, or one JSON object per line for collectors.

All packages log to their own logger ("engine_core", "executor", "transport"), which are configured alike;
the level can be changed while the engine runs.
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

import msgspec

from transport.clock import SYSTEM_CLOCK, Clock
from transport.unblocked import write_some

LOGGERS = ("engine_core", "executor", "transport")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

Format = Literal["text", "json"]

_PATIENCE_S = 0.1  # for somebody who reads slowly
_WINDOW_S = 10.0
_MOST_IN_WINDOW = 10

# What every record has; whatever else it has was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: str = "INFO", format: Format = "text", stream: TextIO | None = None) -> None:
    """Sends the records of our loggers to `stream` (standard error) and nowhere else.

    May be called again. Raises ValueError for an unknown level.
    """
    handler: logging.Handler
    if stream is None and sys.stderr is sys.__stderr__:
        handler = UnblockedHandler(2)
    else:
        handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter() if format == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    set_level(level)


def set_level(level: str, logger: str | None = None) -> None:
    """Changes the level of one of `LOGGERS`, or of all. Raises ValueError for an unknown level or logger."""
    if level.upper() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}; there are {', '.join(LEVELS)}")
    if logger is not None and logger not in LOGGERS:
        raise ValueError(f"unknown logger {logger!r}; there are {', '.join(LOGGERS)}")
    for name in LOGGERS if logger is None else (logger,):
        logging.getLogger(name).setLevel(level.upper())


class UnblockedHandler(logging.Handler):
    """Writes to a descriptor if it takes anything. An engine must not stop because nobody reads its log:
    records are lost then, and how many is told with the next that is not.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._num_lost = 0
        self._unwritten = b""  # the rest of a record that was begun

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record).encode(errors="backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)

    def _write(self, line: bytes) -> None:
        patience_s = 0.0 if self._num_lost or self._unwritten else _PATIENCE_S
        self._unwritten = self._unwritten[write_some(self._fd, self._unwritten) :]
        if self._unwritten:
            self._num_lost += 1
            return
        if self._num_lost:
            line = b"... %d log records were lost: nobody read them\n" % self._num_lost + line
        written = write_some(self._fd, line, patience_s)
        self._num_lost = 0 if written else self._num_lost + 1
        self._unwritten = line[written:] if written else b""


class BoundedWarnings:
    """Warnings about what others do, as often as they like: ten in ten seconds, then a number."""

    def __init__(self, logger: logging.Logger, clock: Clock = SYSTEM_CLOCK) -> None:
        self._logger = logger
        self._clock = clock
        self._begun_s = 0.0
        self._count = 0

    def warn(self, message: str, *args: object) -> None:
        now = self._clock.monotonic()
        if now - self._begun_s > _WINDOW_S:
            if self._count > _MOST_IN_WINDOW:
                self._logger.warning("%d more warnings were not logged", self._count - _MOST_IN_WINDOW)
            self._begun_s, self._count = now, 0
        self._count += 1
        if self._count <= _MOST_IN_WINDOW:
            self._logger.warning(message, *args)


class TextFormatter(logging.Formatter):
    """`I 2031-11-29 18:13:02,123 4711 engine_core: message`, local time."""

    def __init__(self) -> None:
        super().__init__("%(levelname).1s %(asctime)s %(process)d %(name)s: %(message)s")


class JSONFormatter(logging.Formatter):
    """One object per record: time (UTC), level, logger, pid, message, exception if any, and what `extra`
    gave.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        return msgspec.json.encode(line, enc_hook=str).decode()
