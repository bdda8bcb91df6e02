"""Every run has its own temporary directory, and fails if it leaves anything behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests import vllm_rs
from tests.leaks import LeakCheck

# Socket files get long names below TMPDIR, and the kernel allows 107 bytes.
_LONGEST_TMPDIR = 40

_check = pytest.StashKey[LeakCheck]()
_leaks = pytest.StashKey[list[str]]()

# Continuous integration tries the same examples each time; anywhere else each run tries others.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure(config: pytest.Config) -> None:
    # A script that runs the tests in the background has SIGINT ignored in them and in all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # tmp_path stays where people look for it
    base = usual if len(usual) <= _LONGEST_TMPDIR else "/tmp"
    tmp = Path(tempfile.mkdtemp(prefix="ec-", dir=base))
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp)
    config.stash[_check] = LeakCheck(tmp)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    check = session.config.stash[_check]
    leaks = session.config.stash[_leaks] = check.leftovers()
    if leaks and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if not leaks:
        shutil.rmtree(check.tmp)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if leaks := config.stash.get(_leaks, []):
        terminalreporter.section("left behind by this run", red=True)
        for line in leaks:
            terminalreporter.write_line(line)


@pytest.fixture
def run_cli() -> RunCli:
    """Runs `engine-core ARGS...` to its end and returns it with its output as text."""

    def run(*args: object, timeout: float = 50.0, **kwargs: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine_core.cli", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **kwargs)  # type: ignore[call-overload, no-any-return]

    return run


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> vllm_rs.Model:
    """A model directory for vLLM's front end, which is there too: else the test is skipped, and fails in
    CI.
    """
    try:
        vllm_rs.binary()
    except vllm_rs.Unavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    return vllm_rs.make_model(tmp_path_factory.mktemp("model") / "tiny")
