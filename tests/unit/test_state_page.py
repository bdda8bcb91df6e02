"""The state page within one process: rows, the sequence lock, self-description, what is no page."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from transport.processes import own_identity
from transport.shared_row import WORD, Choice, Count, FieldInfo, Real, Row, Text, copy_row, decode_row
from transport.state_page import PageView, StatePage, StatePageError
from transport.state_rows import EngineRow

PROGRESS = {
    "step_id": 7,
    "last_progress_s": 12.5,
    "in_flight": 2,
    "running": 256,
    "waiting": 3,
    "deferred": 1,
    "requests_admitted": 400,
    "requests_finished": 140,
    "blocks_free": 10,
    "blocks_used": 20,
    "blocks_cached": 30,
    "prefix_requests": 5,
    "prefix_queries": 100,
    "prefix_hits": 64,
    "prompt_tokens": 1000,
    "cached_tokens": 64,
    "generation_tokens": 2**40,
    "preemptions": 4,
}


class Sample(Row):
    number = Count("things")
    ratio = Real("s")
    colour = Choice("red", "green", about="of the lamp")
    name = Text(16)
    alone = Count(atomic=True)

    __slots__ = ()


@pytest.fixture
def page() -> Iterator[StatePage]:
    with StatePage.create(num_ranks=2) as page:
        yield page


def sample() -> Sample:
    return Sample(memoryview(bytearray(Sample.num_bytes)))


def read(row: Row) -> dict[str, object]:
    copy, whole = copy_row(row.memory, row.schema())
    assert whole
    return decode_row(copy, row.schema())


def test_fields_read_back_as_they_were_assigned() -> None:
    row = sample()
    row.number = 2**64 - 1
    row.ratio = -0.25
    row.colour = "green"
    row.name = "zwölf"
    row.alone = 5
    row.number -= 1
    assert (row.number, row.ratio, row.colour, row.name, row.alone) == (2**64 - 2, -0.25, "green", "zwölf", 5)
    expected = {"number": 2**64 - 2, "ratio": -0.25, "colour": "green", "name": "zwölf", "alone": 5}
    assert read(row) == expected


def test_a_long_text_is_cut_between_characters() -> None:
    row = sample()
    row.name = "a" + "ö" * 20
    assert row.name == "a" + "ö" * 7  # 15 of 16 bytes: the next character would need two


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_refused_value_leaves_the_row_readable(value: int) -> None:
    row = sample()
    row.number = 3
    with pytest.raises((ValueError, OverflowError)):
        row.number = value
    assert read(row)["number"] == 3
    with pytest.raises(ValueError):
        row.colour = "blue"
    assert read(row)["colour"] == "red"


def test_a_row_in_mid_write_is_not_taken_for_whole() -> None:
    row = sample()
    seen = []

    def store(row: Sample) -> None:
        row.words[Sample.number.word] = 9
        seen.append(copy_row(row.memory, row.schema()))

    row.write(store)
    copy, whole = seen[0]
    assert not whole
    assert decode_row(copy, row.schema())["number"] == 9  # raw values are still there to look at


def test_atomic_fields_are_read_while_the_row_is_in_mid_write() -> None:
    row = sample()
    seen = []

    def store(row: Sample) -> None:
        row.alone = 11
        seen.append(decode_row(copy_row(row.memory, row.schema())[0], row.schema())["alone"])

    row.write(store)
    assert seen == [11]


def test_a_writer_after_a_dead_one_makes_the_row_whole_again() -> None:
    row = sample()
    row.words[0] = 7  # as a writer leaves it that is killed in its fourth write
    successor = Sample(row.memory)
    assert not copy_row(row.memory, row.schema())[1]
    successor.number = 1
    assert read(row)["number"] == 1


def test_schema_tells_each_field_its_place_unit_and_choices() -> None:
    schema = {info.name: info for info in Sample.schema()}
    assert schema["number"] == FieldInfo("number", "u64", word=1, unit="things")
    assert schema["colour"].choices == ["red", "green"]
    assert schema["name"].words == 3
    assert schema["alone"] == FieldInfo("alone", "u64", word=7, atomic=True)
    assert Sample.num_bytes == 8 * WORD


def test_only_numbers_under_the_sequence_make_a_block() -> None:
    packer, place = Sample.block("number", "colour")
    assert (packer.format, place) == ("=QdQ", slice(WORD, 4 * WORD))
    with pytest.raises(TypeError, match="fields of one word"):
        Sample.block("number", "name")


def test_a_fresh_page_has_empty_rows(page: StatePage) -> None:
    snapshot = page.snapshot()
    assert snapshot["engine"]["phase"] == "starting"
    assert snapshot["engine"]["weight_status"] == "NORMAL"
    assert [rank["phase"] for rank in snapshot["ranks"]] == ["not started", "not started"]
    assert "torn" not in snapshot["engine"]


def test_claim_names_the_process_and_forgets_an_earlier_one(page: StatePage) -> None:
    rank = page.rank(1)
    rank.error = "out of memory"
    rank.heartbeat_s = 3.0
    rank.claim()
    row = page.snapshot()["ranks"][1]
    assert (row["pid"], row["start_ticks"]) == (os.getpid(), own_identity().start_ticks)
    assert (row["error"], row["heartbeat_s"]) == ("", 0.0)


def test_progress_writes_every_field_of_a_step(page: StatePage) -> None:
    page.engine.progress(**PROGRESS)  # type: ignore[arg-type]
    engine = page.snapshot()["engine"]
    assert {name: engine[name] for name in PROGRESS} == PROGRESS


def test_a_rank_says_which_call_it_is_in_since_when(page: StatePage) -> None:
    def state(*names: str) -> tuple[object, ...]:
        row = page.snapshot()["ranks"][0]
        return tuple(row[name] for name in names)

    rank = page.rank(0)
    rank.enter("loading model", 1.0)
    assert state("phase", "since_s", "method") == ("loading model", 1.0, "")
    rank.begin_step(7, 41, 2.0)
    assert state("phase", "since_s", "method", "step_id") == ("running", 2.0, "execute_model", 41)
    assert state("taken", "done") == (7, 0)
    rank.end(2.5)
    assert state("phase", "since_s", "steps", "last_step_s") == ("waiting", 2.5, 1, 0.5)
    assert state("taken", "done") == (7, 7)
    rank.begin(8, "update_weights", 3.0)
    assert state("phase", "since_s", "method", "step_id") == ("running", 3.0, "update_weights", 41)
    assert state("taken", "done") == (8, 7)
    rank.end(4.0)
    assert state("phase", "since_s", "method", "steps") == ("waiting", 4.0, "update_weights", 1)
    assert state("taken", "done", "last_step_s") == (8, 8, 0.5)


def test_rows_do_not_touch_each_other(page: StatePage) -> None:
    page.rank(0).error = "x" * 1000
    page.engine.first_error = "y" * 1000
    page.rank(1).begin_step(1, 3, 1.0)
    snapshot = page.snapshot()
    assert len(snapshot["ranks"][0]["error"]) == 256
    assert len(snapshot["engine"]["first_error"]) == 512
    assert snapshot["ranks"][1]["step_id"] == 3


def test_a_saved_page_reads_like_the_page(page: StatePage, tmp_path: Path) -> None:
    page.engine.claim()
    page.engine.progress(**PROGRESS)  # type: ignore[arg-type]
    path = tmp_path / "state"
    path.write_bytes(b"x" * 100_000)  # whatever was there is replaced
    page.view.save(path)
    with StatePage.open(path) as view:
        assert view.snapshot() == page.snapshot()


def test_a_reader_of_another_version_prints_fields_it_does_not_know(page: StatePage) -> None:
    """A page as a later version may write it: new names, a new unit, a new type, a choice added."""
    schema = msgspec.json.encode(
        {
            "engine": [
                {"name": "tea_level", "type": "u64", "word": 1, "unit": "cups", "since": "version 9"},
                {"name": "phase", "type": "choice", "word": 2, "choices": ["cold"]},
                {"name": "address", "type": "ipv6", "word": 3, "words": 2},
            ],
            "rank": [],
        }
    )
    room = -(-len(schema) // WORD) * WORD
    engine = struct.pack("=5Q", 2, 4, 6, 1, 2)
    header = struct.pack("=8s7Q", b"ECSTATE\0", 1, 64, len(schema), 64 + room, 64 + room + 40, 0, 0)
    with PageView(header + schema.ljust(room, b"\0") + engine, "later") as view:
        expected = {"tea_level": 4, "phase": "unknown (6)", "address": struct.pack("=2Q", 1, 2).hex()}
        assert view.snapshot() == {"engine": expected, "ranks": []}


def damaged(page: StatePage, offset: int, word: int) -> bytes:
    image = bytearray(page.view.image())
    struct.pack_into("=Q", image, offset, word)
    return bytes(image)


def test_what_is_no_page_is_refused_with_a_reason(page: StatePage) -> None:
    for image, reason in [
        (b"", "not an engine's state page"),
        (b"\0" * 4096, "still being made"),
        (page.view.image()[:2000], "do not fit 2000 bytes"),
        (damaged(page, 8, 2), "layout 2, but this version reads layout 1"),
        (damaged(page, 24, 10), "its schema"),
        (damaged(page, 48, 24), "a field lies outside its row"),
        (damaged(page, 48, 65), "do not fit"),
        (damaged(page, 56, 2**60), "do not fit"),
    ]:
        with pytest.raises(StatePageError, match=reason):
            PageView(image, "here")


def test_every_damaged_byte_of_the_header_is_refused_or_read_safely(page: StatePage) -> None:
    image = page.view.image()
    for offset in range(64):
        for value in (0x00, 0x01, 0x7F, 0xFF):
            copy = bytearray(image)
            copy[offset] = value
            try:
                with PageView(bytes(copy), "here") as view:
                    view.snapshot()
            except StatePageError:
                continue


def test_the_page_cannot_change_its_size(page: StatePage) -> None:
    for size in (0, 100_000):
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, size)


def test_a_read_only_view_cannot_be_written(page: StatePage) -> None:
    with StatePage.open(f"/proc/self/fd/{page.fd}") as view, pytest.raises(TypeError):
        EngineRow(view._memory[view.places[0]]).restarts = 1


def test_find_and_open_by_pid_in_the_engines_own_process(page: StatePage) -> None:
    page.engine.claim()
    found = [location for location in StatePage.find() if location.engine_pid == os.getpid()]
    assert [location.holders for location in found] == [(os.getpid(),)]
    with StatePage.open(os.getpid()) as view:
        assert view.snapshot()["engine"]["pid"] == os.getpid()


def test_open_names_the_pid_that_has_no_page() -> None:
    with pytest.raises(StatePageError, match="of engine 1"):
        StatePage.open(1)


def test_a_page_of_another_version_is_not_attached(page: StatePage) -> None:
    image = page.view.image().replace(b'"preemptions"', b'"postponings"')
    fd = os.memfd_create("other")
    try:
        os.pwrite(fd, image, 0)
        with pytest.raises(StatePageError, match="another version"):
            StatePage(fd)
    finally:
        os.close(fd)
