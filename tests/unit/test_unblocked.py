"""Whoever does not read our output loses it, and holds up nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from engine_core.logs import UnblockedHandler
from transport.unblocked import write_some


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_as_much_is_written_as_there_is_room_for(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    data = os.urandom(1 << 20)
    written = write_some(writer, data)
    assert 4096 <= written < len(data)
    assert write_some(writer, data[written:]) == 0
    assert os.read(reader, 1 << 20) == data[:written]
    assert write_some(writer, b"more") == 4


def test_lost_log_records_are_counted_and_the_others_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    logger = logging.Logger("test")
    logger.addHandler(UnblockedHandler(writer))
    for i in range(1000):
        logger.error("%d %s", i, "x" * 500)
    text = os.read(reader, 1 << 20)
    while b"lost" not in text:
        logger.error("again")
        text += os.read(reader, 1 << 20)
    *_, last, lost, again, end = text.split(b"\n")
    survivors = int(last.split()[0]) + 1
    assert last == b"%d %s" % (survivors - 1, b"x" * 500)
    assert int(lost.split()[1]) + survivors == 1000
    assert (again, end) == (b"again", b"")
