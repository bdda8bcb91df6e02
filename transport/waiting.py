"""Waiting for another process to change a word of shared memory: look, yield, then sleep; and the fence that
makes it safe.

`SpinCondition` promises: a change is seen whether or not its wake-up arrives (every sleep is bounded), a wait
ends at its deadline, a cancel from another thread ends it at once, a peer's death ends it as soon as the
kernel knows, and a wait that lasts costs no CPU. Nobody makes a system call while messages follow one another
closely.
"""

from __future__ import annotations

import os
import platform
import select
import threading
from collections.abc import Callable

import msgspec

from transport.clock import SYSTEM_CLOCK, Clock
from transport.errors import Cancelled

TOTAL_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")

_MAX_SLEEP_S = 0.25  # a lost wake-up heals within this; four looks a second are not measurable as CPU time
_CHECK_PEERS_S = 0.01  # while spinning for longer than this, look for dead peers this often


_lock = threading.Lock()
_acquire, _release = _lock.acquire, _lock.release


def _new_lock() -> None:
    global _acquire, _release
    lock = threading.Lock()
    _acquire, _release = lock.acquire, lock.release


os.register_at_fork(after_in_child=_new_lock)  # another thread may have held it when this one forked

if TOTAL_STORE_ORDER:

    def memory_fence() -> None:
        """Order every load and store before it before every load and store after it.

        x86: only a store followed by a load can be reordered, and a lock is taken by a LOCK-prefixed
        instruction, which is a full barrier.
        """
        _acquire()
        _release()

else:

    def memory_fence() -> None:
        """Order every load and store before it before every load and store after it.

        AArch64: taking a lock is a load-acquire, which earlier accesses may pass downwards; giving it back is
        a store-release, which later accesses may pass upwards. One pair therefore lets an earlier store and a
        later load swap. But a release followed by an acquire keeps its order (RCsc, `[L]; po; [A]` in the
        architecture's model): the first release waits for all that came before, the second acquire holds back
        all that comes after, and neither passes the other. The same holds where locks use sequentially
        consistent operations.
        """
        _acquire()
        _release()
        _acquire()
        _release()


class WaitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How hard to wait. The default learns; see the two class methods for the extremes."""

    polls: int = 300  # looks without giving up the core, ~50 ns each; skipped if processes outnumber cores
    window_us: float = 100.0  # then look and yield in turn before sleeping: what two wake-ups cost
    adaptive: bool = True  # up to four windows where that usually suffices; none where waits last longer
    processes: int = 0  # that work together on this host; 0: writer and readers of the queue
    warn_after_s: float = 5.0  # log a peer that keeps this end waiting this long, then at every doubling

    @classmethod
    def lowest_latency(cls) -> WaitPolicy:
        """Never sleep in the first second of a wait: a wake-up less per message, for a core per waiting
        process.
        """
        return cls(polls=1000, window_us=1e6, adaptive=False)

    @classmethod
    def few_cores(cls) -> WaitPolicy:
        """Sleep almost at once: for machines where a core that looks is a core that does not work."""
        return cls(polls=10, window_us=0.0, adaptive=False)


class Sleeper:
    """Sleeps on descriptors: this end's doorbell, its cancel, and those watched for news of the peers.

    doorbell: an eventfd that the other side rings, or None; not closed here. on_event: called with each
    watched descriptor that became readable or hung up; raises to end the wait.
    """

    def __init__(self, doorbell: int | None, on_event: Callable[[int], None], *, queue: str) -> None:
        self.cancelled = False
        self._rings = False
        self._doorbell = doorbell
        self._queue = queue
        self._on_event = on_event
        self._cancel_lock = threading.Lock()
        self._cancel_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        if doorbell is not None:
            self._poller.register(doorbell, select.POLLIN)
        self._poller.register(self._cancel_fd, select.POLLIN)

    def watch(self, fd: int) -> None:
        self._poller.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    def cancel(self) -> None:
        """From any thread: end the wait of this one, and every later one, with Cancelled."""
        self.cancelled = True
        with self._cancel_lock:
            if self._cancel_fd >= 0:
                os.eventfd_write(self._cancel_fd, 1)  # stays readable: nobody reads it

    def close(self) -> None:
        with self._cancel_lock:
            os.close(self._cancel_fd)
            self._cancel_fd = -1

    def sleep(self, timeout_s: float) -> None:
        """Until a descriptor is ready, at most `timeout_s`, often less.

        Raises Cancelled, and whatever `on_event` raises.
        """
        self.doze(timeout_s)
        self.silence()

    def doze(self, timeout_s: float) -> bool:
        """Like `sleep`, but True if the doorbell rang; it goes on ringing until `silence`."""
        for fd, _ in self._poller.poll(max(0.0, min(timeout_s, _MAX_SLEEP_S)) * 1000):
            if fd == self._doorbell:
                self._rings = True
            elif fd == self._cancel_fd:
                raise Cancelled(self._queue)
            else:
                self._on_event(fd)
        return self._rings

    def silence(self) -> None:
        if self._rings and self._doorbell is not None:
            os.eventfd_read(self._doorbell)
            self._rings = False

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise Cancelled(self._queue)


class SpinCondition:
    """One end's way to wait until a word of shared memory changes.

    words: the segment as 64-bit words. sleeper: its doorbell is rung by the other side when `park` was
    announced. park, unpark: tell the other side that this one sleeps (a new announcement each time), and that
    it no longer does. crowded: more processes than cores, so that looking without yielding would keep the
    other side from running.
    """

    def __init__(
        self,
        words: memoryview,
        sleeper: Sleeper,
        policy: WaitPolicy,
        *,
        park: Callable[[], None],
        unpark: Callable[[], None],
        crowded: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.waits = 0
        self.parks = 0
        self.waited_s = 0.0
        self.longest_wait_s = 0.0
        self._words = words
        self._sleeper = sleeper
        self._park = park
        self._unpark = unpark
        self._monotonic = clock.monotonic
        self.polls = range(1 if crowded else policy.polls)
        self._turns = range(4 if crowded else 0)  # given to the others before a wait is counted as one
        self._burst = range(1 if crowded else 10)  # looks between two yields
        self._window_s = policy.window_us * 1e-6
        self._adaptive = policy.adaptive
        self._mean_wait_s = 0.0  # moving average in which one long pause counts no more than 16 windows

    def wait(self, index: int, old: int, deadline: float, quick: int = 0) -> bool:
        """Wait until word `index` differs from `old`, at which the caller has looked for `polls` times.
        False when `deadline` (of the clock) passed first.

        quick: how often, since the last wait, the change had come by then. Raises Cancelled, and what the
        sleeper's `on_event` raises.
        """
        words = self._words
        for _ in self._turns:
            os.sched_yield()
            if words[index] != old:
                return True
        self._mean_wait_s *= 0.875 ** min(1 + quick, 64)
        start = self._monotonic()
        self.waits += 1
        try:
            window, mean = self._window_s, self._mean_wait_s
            if self._adaptive:
                # To stop looking just before the change comes would cost both the looking and the wake-up.
                window = max(window, 2 * mean) if mean <= 2 * window else 0.0
            return self._spin(index, old, min(start + window, deadline), start) or self._sleep(
                index, old, deadline
            )
        finally:
            waited = self._monotonic() - start
            self.waited_s += waited
            if waited > self.longest_wait_s:
                self.longest_wait_s = waited
            self._mean_wait_s += min(waited, 16 * self._window_s) * 0.125

    def _spin(self, index: int, old: int, end: float, now: float) -> bool:
        words = self._words
        check_at = now + _CHECK_PEERS_S
        while True:
            os.sched_yield()
            for _ in self._burst:
                if words[index] != old:
                    return True
            self._sleeper.raise_if_cancelled()
            now = self._monotonic()
            if now >= end:
                return False
            if now >= check_at:
                self._sleeper.sleep(0.0)
                check_at = now + _CHECK_PEERS_S

    def _sleep(self, index: int, old: int, deadline: float) -> bool:
        words, sleeper = self._words, self._sleeper
        self.parks += 1
        sleeper.silence()  # the ring that ended the last sleep: on waking up, it would have cost time
        self._park()
        try:
            # Announced before looking once more: either this look sees the change, or the other side sees the
            # announcement after making it and rings. Without the fence both could miss.
            memory_fence()
            while words[index] == old:
                left = deadline - self._monotonic()
                if left <= 0.0:
                    return False
                if sleeper.doze(left) and words[index] == old:
                    # The change is on its way: the other side may ring before it makes it.
                    now = self._monotonic()
                    if self._spin(index, old, min(now + self._window_s, deadline), now):
                        return True
                    sleeper.silence()
                    self._park()  # a ring answers one announcement; the next sleep needs a new one
                    memory_fence()
            return True
        finally:
            self._unpark()
