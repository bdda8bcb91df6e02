"""Waiting for a word: every way a wait may end, with threads in place of processes."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from transport import Cancelled, SpinCondition, WaitPolicy, memory_fence
from transport.waiting import Sleeper

SLEEP_AT_ONCE = WaitPolicy.few_cores()


class Fixture:
    def __init__(self, policy: WaitPolicy = SLEEP_AT_ONCE) -> None:
        self.words = memoryview(bytearray(64)).cast("Q")
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.events: list[int] = []
        self.parked = 0
        self.announcements = 0
        self.quick = 0
        self.sleeper = Sleeper(self.bell, self.events.append, queue="q")
        self.condition = SpinCondition(self.words, self.sleeper, policy, park=self.park, unpark=self.unpark)

    def park(self) -> None:
        self.parked = 1
        self.announcements += 1

    def unpark(self) -> None:
        self.parked = 0

    def wait(self, seconds: float, old: int = 0) -> bool:
        if any(self.words[3] != old for _ in self.condition.polls):
            self.quick += 1
            return True
        quick, self.quick = self.quick, 0
        return self.condition.wait(3, old, time.monotonic() + seconds, quick)

    def later(self, seconds: float, action: Callable[[], object]) -> threading.Timer:
        timer = threading.Timer(seconds, action)
        timer.start()
        return timer

    def change(self, value: int = 1) -> None:
        self.words[3] = value

    def ring(self) -> None:
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        self.sleeper.close()
        os.close(self.bell)


@pytest.fixture
def made() -> Iterator[Fixture]:
    fixture = Fixture()
    yield fixture
    fixture.close()


@pytest.mark.parametrize("policy", [WaitPolicy(), WaitPolicy.few_cores(), WaitPolicy.lowest_latency()])
def test_a_change_made_before_is_seen_without_announcing_a_sleep(policy: WaitPolicy) -> None:
    made = Fixture(policy)
    made.change()
    assert made.wait(5)
    assert made.announcements == 0
    made.close()


@pytest.mark.parametrize("policy", [WaitPolicy(), WaitPolicy.few_cores(), WaitPolicy.lowest_latency()])
def test_a_ring_ends_a_sleep(policy: WaitPolicy) -> None:
    made = Fixture(policy)
    timer = made.later(0.05, lambda: (made.change(), made.ring()))
    assert made.wait(10)
    assert made.parked == 0
    timer.join()
    made.close()


def test_a_lost_ring_delays_but_does_not_lose_the_change(made: Fixture) -> None:
    timer = made.later(0.05, made.change)
    assert made.wait(10)
    timer.join()
    assert made.condition.longest_wait_s < 5


def test_a_ring_for_nothing_leads_to_a_new_announcement(made: Fixture) -> None:
    made.ring()
    assert not made.wait(0.05)
    assert made.announcements == 2


def test_the_deadline_ends_a_wait(made: Fixture) -> None:
    assert not made.wait(0.01)
    assert not made.wait(-1)
    assert not made.wait(0)
    assert made.parked == 0


def test_cancel_from_another_thread_ends_this_wait_and_every_later_one(made: Fixture) -> None:
    timer = made.later(0.05, made.sleeper.cancel)
    with pytest.raises(Cancelled):
        made.wait(math.inf)
    assert made.parked == 0
    with pytest.raises(Cancelled):
        made.wait(math.inf)
    timer.join()


def test_cancel_ends_a_spin_too() -> None:
    made = Fixture(WaitPolicy(window_us=60e6, adaptive=False))
    timer = made.later(0.05, made.sleeper.cancel)
    with pytest.raises(Cancelled):
        made.wait(math.inf)
    timer.join()
    made.close()


@pytest.mark.parametrize("policy", [SLEEP_AT_ONCE, WaitPolicy(window_us=60e6, adaptive=False)])
def test_news_of_a_peer_ends_sleep_and_spin_alike(policy: WaitPolicy) -> None:
    made = Fixture(policy)
    end, far = os.pipe()
    made.sleeper.watch(end)
    timer = made.later(0.05, lambda: os.close(far))
    timer2 = made.later(0.3, lambda: (made.change(), made.ring()))
    assert made.wait(10)
    assert end in made.events
    timer.join()
    timer2.join()
    os.close(end)
    made.close()


def test_long_waits_teach_it_to_sleep_at_once_and_short_ones_to_spin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Fixture(WaitPolicy(polls=1, window_us=1000.0))
    for _ in range(30):
        assert not made.wait(0.02)
    parks = made.condition.parks
    assert parks == 30
    value = 0
    for _ in range(60):  # quick answers
        value += 1
        made.change(value)
        assert made.wait(1, old=value - 1)
    yields: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(None))
    assert not made.wait(0.002, old=value)
    assert len(yields) > 5, "did not spin"
    made.close()


def test_counters_tell_how_long_and_how(made: Fixture) -> None:
    made.wait(0.02)
    condition = made.condition
    assert (condition.waits, condition.parks) == (1, 1)
    assert 0.02 <= condition.longest_wait_s <= condition.waited_s < 5


def test_memory_fence_may_be_used_by_all_threads_and_after_fork() -> None:
    stop = threading.Event()

    def fence() -> None:
        while not stop.is_set():
            memory_fence()

    threads = [threading.Thread(target=fence) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            memory_fence()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
