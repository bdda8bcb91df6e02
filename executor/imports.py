"""Objects of the user's own modules, by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def import_object(name: str, error_cls: Callable[[str], Exception]) -> Any:
    """What `package.module:name` or `package.module.name` stands for; the current directory is searched last.

    Raises `error_cls`.
    """
    module_name, colon, path = name.partition(":")
    if not colon:
        module_name, _, path = name.rpartition(".")
    if not (module_name and path):
        raise error_cls("expected the form package.module:name")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise error_cls(f"importing {module_name} raised {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise error_cls(f"module {module_name} has no {path}")
        found = getattr(found, part)
    return found
