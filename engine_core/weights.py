"""Which weights the ranks have, and whether they all have the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from engine_core.core import EngineCore
from executor.errors import ExecutorError

logger = logging.getLogger("engine_core")


class FailedUpdate(NamedTuple):
    version: str
    num_restarts: int  # of the ranks by then


class WeightsUndefined(RuntimeError):
    """An update of the weights failed: some ranks may have the new ones, some the old ones."""


class Weights:
    """Their version, and what an update that failed half-way leaves: `failed`, until an update succeeds or
    the ranks are restarted.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.version = "default"
        self.status = "NORMAL"  # as in the state page
        self.failed: FailedUpdate | None = None

    @property
    def are_undefined(self) -> bool:
        failed = self.failed
        return failed is not None and failed.num_restarts == self._core.num_restarts

    def check(self) -> None:
        """Raises WeightsUndefined if they are."""
        failed = self.failed
        if failed is None:
            return
        if self.are_undefined:
            raise WeightsUndefined(
                f"the update of the weights to version {failed.version} failed half-way: update "
                "them again, or restore them"
            )
        self.failed = None
        self.status = "NORMAL"

    def update(self, version: str, update: dict[str, Any], show: Callable[[], None]) -> None:
        """Have every rank update its weights; the engine is idle. Raises WeightsUndefined if one fails.

        `show` is called when there is something new to be seen.
        """
        self.status = "UPDATING"
        show()
        try:
            self._core.executor.collective_rpc("update_weights", args=(update,))
        except ExecutorError as error:
            self.status = "FAILED"
            self.failed = FailedUpdate(version, self._core.num_restarts)
            raise WeightsUndefined(
                f"{error}; some ranks may have the weights of version {version} and some those of "
                f"{self.version}, so the engine stays paused: update the weights again, or restore them"
            ) from error
        self.failed = None
        self.version = version
        self.status = "NORMAL"
        logger.info("the weights are of version %s", version)
