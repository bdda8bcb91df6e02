"""How many live requests use which LoRA adapter."""

from __future__ import annotations

from collections.abc import MutableMapping

from engine_core.request import Request


class AdapterCounts:
    """Requests by the adapter's name; requests without one are passed over."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}

    def queued(self, request: Request) -> None:
        """It waits from now on, after it arrived."""
        _count(request, self.waiting, 1)

    def scheduled(self, request: Request) -> None:
        """It waited, and runs."""
        _count(request, self.waiting, -1)
        _count(request, self.running, 1)

    def preempted(self, request: Request) -> None:
        """It ran, and waits."""
        _count(request, self.running, -1)
        _count(request, self.waiting, 1)

    def ended(self, request: Request, was_running: bool) -> None:
        _count(request, self.running if was_running else self.waiting, -1)


def _count(request: Request, counts: MutableMapping[str, int], change: int) -> None:
    if request.lora is None:
        return
    name = request.lora.name
    count = counts.get(name, 0) + change
    if count:
        counts[name] = count
    else:
        del counts[name]
