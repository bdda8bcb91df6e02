"""What `explain` says of a request: state, what it waits for, its place, its preemptions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_core.config import EngineConfig
from engine_core.lab.virtual_clock import VirtualClock
from engine_core.protocol import FinishReason
from engine_core.scheduler import history
from engine_core.scheduler.explain import Explanation, UnknownRequest, explain
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.step import LoRARequest
from tests.scheduling import make_request, run_step


class Bench:
    """A scheduler in virtual time."""

    def __init__(self, blocks: int = 100, **fields: Any) -> None:
        fields = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **fields}
        self.clock = VirtualClock()
        self.scheduler = Scheduler(EngineConfig(**fields), blocks, 2000, self.clock)

    def add(self, request_id: str, length: int, **kw: Any) -> None:
        start = sum(request_id.encode()) * 1000
        self.scheduler.add_request(
            make_request(request_id, list(range(start, start + length)), self.scheduler, **kw)
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance_to(self.clock.monotonic() + 1.0)
            run_step(self.scheduler)

    def explain(self, request_id: str) -> Explanation:
        before = msgspec.msgpack.encode(sorted(self.scheduler.requests)), self.scheduler.kv.pool.num_free
        answer = explain(self.scheduler, request_id)
        assert before == (
            msgspec.msgpack.encode(sorted(self.scheduler.requests)),
            self.scheduler.kv.pool.num_free,
        )
        assert not self.scheduler.check()
        assert answer.text and msgspec.json.encode(answer)
        return answer

    def waits_for(self, request_id: str) -> list[str]:
        return [wait.what for wait in self.explain(request_id).waits_for]


def test_a_running_request_tells_how_far_it_is() -> None:
    bench = Bench(async_scheduling=False)
    bench.add("a", 100, max_tokens=9)
    bench.step()
    assert "64 of 100" in bench.explain("a").text
    bench.step(4)
    it = bench.explain("a")
    assert (it.state, it.for_s, it.output_tokens, it.most_output_tokens) == ("running", 4.0, 4, 9)
    assert (it.computed_tokens, it.prefix_hit_tokens, it.waits_for, it.place) == (103, 0, [], None)


def test_a_new_request_waits_for_nothing() -> None:
    bench = Bench()
    bench.add("a", 10)
    it = bench.explain("a")
    assert (it.state, it.place, it.waits_for, it.prefix_hit_tokens) == ("waiting", 0, [], None)


def test_a_request_waits_its_turn_and_for_a_seat() -> None:
    bench = Bench()
    for name in "abcdefg":
        bench.add(name, 10)
    bench.step(2)
    assert bench.waits_for("e") == ["seats"]
    it = bench.explain("g")
    assert [wait.what for wait in it.waits_for] == ["turn", "seats"]
    assert (it.place, it.ahead, it.tokens_ahead) == (2, ["e", "f"], 20)


def test_a_limit_that_was_lowered_takes_seats() -> None:
    bench = Bench()
    bench.add("a", 10)
    bench.step()
    bench.add("b", 10)
    assert bench.waits_for("b") == []
    bench.scheduler.set_limits(1, 64)
    assert bench.waits_for("b") == ["seats"]


def test_a_request_waits_for_tokens_of_the_step() -> None:
    bench = Bench()
    bench.add("long", 400)
    bench.add("b", 10)
    bench.step()
    it = bench.explain("b")
    assert [(wait.what, wait.needed, wait.free) for wait in it.waits_for] == [("tokens", 1, 0)]


def test_a_request_waits_for_blocks_with_numbers() -> None:
    bench = Bench(blocks=11)
    bench.add("a", 60, max_tokens=100)
    bench.step()
    bench.add("b", 120)
    it = bench.explain("b")
    assert [(wait.what, wait.needed, wait.free) for wait in it.waits_for] == [("blocks", 8, 6)]
    assert "8 more KV blocks, 6" in it.text


def test_what_is_cached_need_not_be_free_twice() -> None:
    bench = Bench(blocks=11)
    bench.add("a", 64, max_tokens=1)
    bench.step(2)
    bench.add("b", 60, max_tokens=100)
    bench.step()
    prompt = list(range(97000, 97064)) + list(range(90))
    bench.scheduler.add_request(make_request("c", prompt, bench.scheduler))
    (wait,) = bench.explain("c").waits_for
    # 10 blocks, of which 4 are cached but free; "b" has 4, so that 2 are to be had beside them.
    assert (wait.what, wait.needed, wait.free) == ("blocks", 6, 2)


def test_a_pause_is_told() -> None:
    bench = Bench()
    bench.add("a", 10)
    bench.step()
    bench.add("b", 10)
    bench.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert (bench.waits_for("a"), bench.waits_for("b")) == ([], ["pause"])
    bench.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert (bench.waits_for("a"), bench.waits_for("b")) == (["pause"], ["pause"])


def test_a_lora_adapter_without_a_place_is_told() -> None:
    bench = Bench(enable_lora=True, max_loras=1)
    bench.add("a", 10, lora=LoRARequest("red", 1, "/red"))
    bench.step()
    bench.add("b", 10, lora=LoRARequest("blue", 2, "/blue"))
    assert bench.waits_for("b") == ["LoRA"]
    assert "blue" in bench.explain("b").text and "red" in bench.explain("b").text


def test_a_request_that_must_sit_out_a_search_is_told() -> None:
    bench = Bench()
    bench.add("a", 10)
    bench.add("b", 10)
    bench.step()
    bench.scheduler.allow_only(["a"])
    it = bench.explain("b")
    assert (it.state, [wait.what for wait in it.waits_for]) == ("preempted", ["search"])


@pytest.mark.parametrize(("blocks", "length", "winner"), [(8, 34, "a"), (10, 60, "b")])
def test_preemptions_are_told_with_when_and_for_whom(blocks: int, length: int, winner: str) -> None:
    bench = Bench(blocks=blocks, async_scheduling=False)
    bench.add("a", 60, max_tokens=50)
    bench.add("b", length, max_tokens=50)
    while not bench.scheduler.requests["b"].num_preemptions:
        bench.step()
    step_id = bench.scheduler._step_id
    bench.step(3)
    it = bench.explain("b")
    assert it.state == "preempted"
    (lost,) = it.preemptions
    assert (lost.ago_s, lost.step_id, lost.why, lost.winner) == (3.0, step_id, history.BLOCKS_RAN_OUT, winner)
    assert it.waits_for[0].what == "blocks" and "preempted once" in it.text
    assert ("for request a" in it.text) == (winner == "a")

    bench.scheduler.restart()
    assert bench.explain("a").preemptions[0].why == history.WORKERS_RESTARTED


def test_an_ended_request_is_remembered_for_some_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(async_scheduling=False)
    bench.add("a", 10, max_tokens=3)
    bench.add("gone", 10)
    bench.step(3)
    bench.scheduler.finish_requests(["gone"], FinishReason.ABORT)
    it = bench.explain("a")
    assert (it.state, it.finish_reason, it.output_tokens, it.for_s, it.age_s) == (
        "finished",
        "length",
        3,
        0,
        3,
    )
    assert bench.explain("gone").finish_reason == "abort"
    bench.clock.advance_to(bench.clock.monotonic() + history.REMEMBERED_S + 1)
    with pytest.raises(UnknownRequest):
        bench.explain("a")

    monkeypatch.setattr(history, "MOST_FINISHED", 5)
    for number in range(20):
        bench.add(f"r{number}", 5, max_tokens=1)
        bench.step()
    assert len(bench.scheduler.history.finished(bench.clock.monotonic())) == 5
    assert not bench.scheduler.history.preemptions


def test_the_beginning_of_an_id_will_do_if_there_is_one_such() -> None:
    bench = Bench()
    bench.add("chat-1-x", 10)
    bench.add("chat-2-y", 10)
    assert bench.explain("chat-2").request_id == "chat-2-y"
    for unclear in ("chat", "nobody", ""):
        with pytest.raises(UnknownRequest):
            bench.explain(unclear)
