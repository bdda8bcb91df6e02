"""Which calls are made again on ranks that take the place of others."""

from __future__ import annotations

from typing import Any

import numpy as np

from executor.lasting_calls import LastingCalls
from executor.step import LoRARequest


def after(*calls: tuple[str, list[Any]]) -> list[tuple[str, list[Any]]]:
    lasting = LastingCalls()
    for method, args in calls:
        lasting.record(method, args, {})
    return [(call.method, list(call.args)) for call in lasting]


def test_what_leaves_no_trace_is_not_kept() -> None:
    assert after(("check_health", []), ("profile", [True]), ("whatever", [1])) == []


def test_ranks_that_slept_sleep_again() -> None:
    assert after(("sleep", [1])) == [("sleep", [1])]
    assert after(("sleep", [1]), ("sleep", [2])) == [("sleep", [2])]


def test_ranks_that_were_woken_up_stay_awake() -> None:
    assert after(("sleep", [1]), ("wake_up", [None])) == []
    assert after(("sleep", [1]), ("wake_up", [])) == []
    half = [("sleep", [2]), ("wake_up", [["weights"]])]
    assert after(*half) == half
    assert after(*half, ("sleep", [1])) == [("sleep", [1])]


def test_adapters_are_loaded_again_unless_they_were_removed() -> None:
    one, two = LoRARequest("one", 1, "/one"), ["two", 2, "/two"]
    assert after(("add_lora", [one]), ("add_lora", [two]), ("remove_lora", [1])) == [("add_lora", [two])]
    assert after(("add_lora", [one]), ("pin_lora", [1])) == [("add_lora", [one]), ("pin_lora", [1])]
    assert after(("add_lora", [one]), ("pin_lora", [1]), ("remove_lora", [1])) == []
    assert after(*[("add_lora", [two])] * 50) == [("add_lora", [two])]


def test_weights_that_were_replaced_are_known_to_be_lost() -> None:
    lasting = LastingCalls()
    assert lasting.lost is None
    lasting.record("update_weights", [{"path": "/step-1"}], {})
    assert lasting.lost is None
    lasting.record("update_weights", [{"tensors": {"norm": np.ones(3)}}], {})
    assert lasting.lost == "update_weights"


def test_updates_of_weights_that_can_be_repeated_are() -> None:
    updates: list[tuple[str, list[Any]]] = [
        ("update_weights", [{"path": "/step-1"}]),
        ("update_weights", [{"scale": {"norm": 2.0}}]),
    ]
    assert after(*updates, ("sleep", [1])) == [*updates, ("sleep", [1])]


def test_updates_that_are_not_the_engines_are_lost() -> None:
    lasting = LastingCalls()
    lasting.record("update_weights", [], {"update_info": {"names": ["norm"]}})
    assert lasting.lost == "update_weights"
