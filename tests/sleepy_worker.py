"""A worker that remembers how it was put to sleep and woken."""

from __future__ import annotations

from executor.config import ExecutorConfig
from executor.mock_worker import MockWorker


class SleepyWorker(MockWorker):
    def __init__(self, config: ExecutorConfig, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self._history: list[str] = []

    def sleep(self, level: int = 1) -> None:
        self._history.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._history.append(f"wake_up {tags}")

    def history(self) -> list[str]:
        return self._history
