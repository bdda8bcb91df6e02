"""No bytes from another process raise anything but what is expected, nor take memory that they do not bring.

`make fuzz` looks further, with coverage as its guide.
"""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=40) | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=30,
)  # fmt: skip
well_formed = values.map(msgspec.msgpack.encode)


def mutated(seed: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    data = bytearray(seed)
    for where, byte in changes:
        data[where % len(data)] = byte
    return bytes(data[: cut % (2 * len(data)) + 1])


def inputs(name: str) -> st.SearchStrategy[bytes]:
    changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)
    near = st.builds(mutated, st.sampled_from(SEEDS[name]), changes, st.integers(0, 1 << 16))
    return st.binary(max_size=200) | near | well_formed | well_formed.map(lambda d: bytes([255]) + d)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_survived(name: str) -> None:
    @settings(
        max_examples=60 if name == "engine_messages" else 250,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(inputs(name))
    def survive(data: bytes) -> None:
        TARGETS[name](data)

    survive()


@pytest.mark.parametrize("name", TARGETS)
def test_valid_messages_are_accepted(name: str) -> None:
    """The seeds are what they claim to be."""
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"engine_messages"}))
def test_memory_follows_the_bytes_that_came_and_not_those_that_were_announced(name: str) -> None:
    rng = random.Random(name)
    lies = [head + size.to_bytes(4, "big") for head in (b"\xdd", b"\xdb", b"\xc6", b"\xdf", b"\xc9")
            for size in (1 << 24, (1 << 32) - 1)]  # fmt: skip
    for seed in SEEDS[name]:
        for lie in lies:
            where = rng.randrange(len(seed))
            data = seed[:where] + lie + seed[where:]
            tracemalloc.start()
            TARGETS[name](data)
            TARGETS[name](lie)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 4 << 20, f"{peak} bytes for a message of {len(data)}"
