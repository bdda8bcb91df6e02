"""Errors in words, whatever a worker raises."""

from __future__ import annotations

from executor.errors import described, traceback_of


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_a_text_that_no_encoding_takes_is_told_all_the_same() -> None:
    assert described(RuntimeError("\udcff")) == "RuntimeError: \\udcff"
    assert described(Unspeakable()) == "Unspeakable: (its text cannot be had: ValueError)"
    for error in (RuntimeError("\udcff"), Unspeakable()):
        assert type(error).__name__ in traceback_of(error).encode().decode()


def test_texts_are_bounded() -> None:
    error = RuntimeError("x" * 5_000_000)
    assert len(described(error)) < 2100 and described(error).endswith("(5000000 characters)")
    assert len(traceback_of(error)) <= 16 << 10
