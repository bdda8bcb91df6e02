"""A clock that moves only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """Time of a simulation, in seconds since its start. Unix time is the same number."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def time(self) -> float:
        return self._now_s

    def advance_to(self, when_s: float) -> None:
        """Let it be `when_s`, unless it is later already."""
        if when_s > self._now_s:
            self._now_s = when_s
