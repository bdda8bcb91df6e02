"""How to start a module of ours as a process: the one that is imported here, wherever the user is."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

# `python -m` would look into the current directory first, where any file may have the name of a module.
_RUN = "import runpy, sys; sys.path.remove(''); runpy.run_module({!r}, run_name='__main__', alter_sys=True)"


def module_command(module: str, *args: object) -> list[str]:
    """The command that runs `python -m MODULE ARGS...`, without the current directory in `sys.path`."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module, *map(str, args)]
    return [sys.executable, "-c", _RUN.format(module), *map(str, args)]


def module_environment() -> dict[str, str]:
    """Ours, with our packages to be found where they were found here."""
    root = str(Path(__file__).resolve().parent.parent)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
