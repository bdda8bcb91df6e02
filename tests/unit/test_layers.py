"""Imports go down only: engine_core -> executor -> transport."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("transport", "executor", "engine_core")  # from the bottom


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    above = set(LAYERS[LAYERS.index(package) + 1 :]) | {"tests", "examples", "benchmarks"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in sorted(_imported(path) & above)
    ]
    assert not wrong


@pytest.mark.parametrize("package", LAYERS)
def test_nothing_uses_pickle_or_multiprocessing(package: str) -> None:
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.parent.name != "bench"  # measures others beside us, and they use it
        for name in sorted(_imported(path) & banned)
    ]
    assert not wrong
