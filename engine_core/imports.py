"""Objects of the user's own modules, by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable


def import_object(name: str, error_cls: Callable[[str], Exception]) -> object:
    """What `package.module:name` stands for; the current directory is searched last. Raises `error_cls`."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise error_cls(f"{name!r} must read package.module:name")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise error_cls(f"importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise error_cls(f"module {module_name} has no {attribute}")
    return getattr(module, attribute)
