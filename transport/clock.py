"""The one clock. Whatever reads time takes a `Clock`, so that a test or a simulation can supply its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time, in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back. Comparable between processes of one host."""
        ...

    def time(self) -> float:
        """Unix time."""
        ...


class SystemClock:
    """The operating system's clocks."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


SYSTEM_CLOCK = SystemClock()
