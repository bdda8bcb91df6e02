"""The scheduler class that a configuration names."""

from __future__ import annotations

from engine_core.config import ConfigError, EngineConfig
from engine_core.scheduler.scheduler import Scheduler
from executor.imports import import_object


def scheduler_class(config: EngineConfig) -> type[Scheduler]:
    """`config.scheduler_cls`, or `Scheduler` if it names none. Raises `ConfigError`.

    What a class of one's own may override, and what it is asked and told when, is in docs/laboratory.md.
    """
    name = config.scheduler_cls
    if not name:
        return Scheduler

    def error(reason: str) -> ConfigError:
        return ConfigError("scheduler_cls", name, reason)

    found = import_object(name, error)
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise error("is not a subclass of engine_core.scheduler.scheduler.Scheduler")
    return found
