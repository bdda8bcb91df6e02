"""Log records as text and as JSON, and levels that change while the engine runs."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    before = {
        name: (logger.handlers, logger.propagate, logger.level)
        for name in logs.LOGGERS
        for logger in [logging.getLogger(name)]
    }
    yield io.StringIO()
    for name, (handlers, propagate, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_text_is_a_line_with_level_time_logger_and_process(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    logging.getLogger("executor").warning("rank %d is late", 3)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"W {time} {os.getpid()} executor: rank 3 is late\n", stream.getvalue())


def test_json_is_an_object_a_line_with_what_extra_gave(stream: io.StringIO) -> None:
    logs.configure(format="json", stream=stream)
    logging.getLogger("engine_core").info("two\nlines", extra={"step": 12, "where": Path("/x")})
    line = stream.getvalue()
    assert line.count("\n") == 1
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert record == {
        "level": "INFO",
        "logger": "engine_core",
        "pid": os.getpid(),
        "message": "two\nlines",
        "step": 12,
        "where": "/x",
    }


def test_json_has_the_exception(stream: io.StringIO) -> None:
    logs.configure(format="json", stream=stream)
    try:
        raise KeyError("nobody")
    except KeyError:
        logging.getLogger("transport").exception("lost")
    record = json.loads(stream.getvalue())
    assert record["exception"].startswith("Traceback")
    assert record["exception"].endswith("KeyError: 'nobody'")


def test_levels_change_while_running_for_all_loggers_or_one(stream: io.StringIO) -> None:
    logs.configure("WARNING", stream=stream)
    logging.getLogger("executor").info("1")
    logs.set_level("debug")
    logging.getLogger("executor").debug("2")
    logs.set_level("ERROR", "executor")
    logging.getLogger("executor").warning("3")
    logging.getLogger("engine_core").info("4")
    assert [line[-1] for line in stream.getvalue().splitlines()] == ["2", "4"]


def test_configuring_again_does_not_double_the_lines(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    logs.configure(stream=stream)
    logging.getLogger("engine_core").info("once")
    assert stream.getvalue().count("once") == 1


def test_an_unknown_level_or_logger_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown log level 'LOUD'; there are DEBUG, INFO"):
        logs.set_level("LOUD")
    with pytest.raises(ValueError, match="unknown logger 'root'; there are engine_core"):
        logs.set_level("INFO", "root")


def test_warnings_about_others_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    warnings = logs.BoundedWarnings(logging.getLogger("engine_core"), clock)
    for i in range(1000):
        warnings.warn("number %d", i)
    clock.now += 11
    warnings.warn("again")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [*(f"number {i}" for i in range(10)), "990 more warnings were not logged", "again"]


class FakeClock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now
