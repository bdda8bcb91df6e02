"""An engine in the caller's own process and thread, for debugging: the same messages, no sockets.

The engine works while a method of the client runs.
"""

from __future__ import annotations

from engine_core.blocking_client import BlockingClient
from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.dispatch import Dispatcher
from engine_core.errors import EngineDeadError
from engine_core.proc import first_cause, make_registration
from engine_core.protocol import ReadyResponse
from engine_core.wire import Frame
from executor.base import make_executor
from transport.clock import SYSTEM_CLOCK, Clock


class InprocClient(BlockingClient):
    """`core` is there to be looked into."""

    def __init__(self, config: EngineConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        """Starts the workers. Raises `ExecutorError` or `ConfigError`."""
        super().__init__(clock)
        config.validate()
        executor = make_executor(config.executor_config())
        try:
            self.core = EngineCore(config, executor, clock)
        except BaseException:
            executor.shutdown()
            raise
        self._dispatcher = Dispatcher(self.core, clock=clock)
        self._info = make_registration(config, self.core, None, None)

    @classmethod
    def launch(cls, config: EngineConfig) -> InprocClient:
        return cls(config)

    @property
    def info(self) -> ReadyResponse:
        """What the engine is."""
        return self._info

    def _send(self, frames: list[Frame]) -> None:
        self._dispatcher.receive(0, range(1), frames)
        self._deliver()

    def _pump(self, deadline: float | None) -> bool:
        if deadline is not None and self._clock.monotonic() >= deadline:
            return False
        if not self.core.has_work:
            raise RuntimeError("the engine has nothing to do, so what is waited for would never come")
        try:
            self._dispatcher.step()
        except Exception as error:  # a crash, as it would end an engine's process
            self._session.fail(EngineDeadError(first_cause(error)))
        self._deliver()
        return True

    def _deliver(self) -> None:
        outbox = self._dispatcher.outbox
        for _, frames in outbox:
            self._session.feed(frames)
        outbox.clear()

    def _close(self) -> None:
        self.core.shutdown()
