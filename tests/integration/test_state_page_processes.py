"""The state page between real processes: hung, stopped and killed writers, and what is left of them."""

from __future__ import annotations

import os
import platform
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from transport.state_page import PageLocation, StatePage

PRELUDE = """
import os, signal, sys, time
from transport.heartbeat import Heartbeat
from transport.state_page import StatePage
from transport.state_rows import EngineRow, RankRow
def say(text): print(text, flush=True)
"""
ENGINE = """
page = StatePage.create(num_ranks=1)
page.engine.claim()
page.engine.model = "mock"
page.engine.phase = "ready"
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process and waits for its first line of output."""
    processes: list[subprocess.Popen[str]] = []

    def start(script: str, *args: object, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, args)],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def locate(engine_pid: int) -> PageLocation | None:
    return next((place for place in StatePage.find() if place.engine_pid == engine_pid), None)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def await_stop(process: subprocess.Popen[str]) -> None:
    """Until the process has stopped itself."""
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def gone_within_5_s(engine_pid: int) -> bool:
    deadline = time.monotonic() + 5
    while locate(engine_pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return locate(engine_pid) is None


def test_any_process_reads_the_page_of_a_hung_engine(start: Start) -> None:
    engine = start(
        ENGINE
        + """
page.rank(0).claim()
page.rank(0).begin_step(1, 12, 34.5)
say("ready")
os.kill(os.getpid(), signal.SIGSTOP)
"""
    )
    await_stop(engine)
    reader = subprocess.run(
        [
            sys.executable,
            "-c",
            PRELUDE + "print(StatePage.open(int(sys.argv[1])).snapshot())",
            str(engine.pid),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "'model': 'mock'" in reader.stdout
    assert "'phase': 'running', 'since_s': 34.5, 'step_id': 12" in reader.stdout
    kill(engine)
    assert gone_within_5_s(engine.pid)


def test_a_heartbeat_goes_on_while_the_main_thread_is_stuck_and_stops_with_the_process(start: Start) -> None:
    engine = start(
        ENGINE
        + """
Heartbeat(page.engine, interval_s=0.01).start()
say("ready")
time.sleep(60)
"""
    )
    with StatePage.open(engine.pid) as view:

        def beats_on() -> bool:
            before = view.snapshot()["engine"]["heartbeat_s"]
            deadline = time.monotonic() + 2
            while view.snapshot()["engine"]["heartbeat_s"] == before and time.monotonic() < deadline:
                time.sleep(0.01)
            return bool(view.snapshot()["engine"]["heartbeat_s"] > before)

        assert beats_on()
        engine.send_signal(signal.SIGSTOP)
        await_stop(engine)
        assert not beats_on()


MID_WRITE = """
def store(row, end):
    row.words[EngineRow.restarts.word] = 99
    say("ready")
    os.kill(os.getpid(), end)
page.engine.write(store, getattr(signal, sys.argv[1]))
"""


def test_a_row_that_a_stopped_writer_left_in_mid_write_is_still_shown_and_says_so(start: Start) -> None:
    engine = start(ENGINE + MID_WRITE, "SIGSTOP")
    await_stop(engine)
    with StatePage.open(engine.pid) as view:
        row = view.snapshot()["engine"]
        assert row["torn"] == "by a writer stopped in mid-write"
        assert (row["model"], row["restarts"]) == ("mock", 99)
        engine.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 10
        while "torn" in view.snapshot()["engine"] and time.monotonic() < deadline:
            time.sleep(0.01)
        row = view.snapshot()["engine"]
        assert "torn" not in row


def test_a_row_that_a_killed_writer_left_in_mid_write_is_still_shown_and_says_so(start: Start) -> None:
    with StatePage.create(num_ranks=2) as page:
        page.engine.claim()
        rank = start(
            """
            row = StatePage(int(sys.argv[1])).rank(1)
            row.claim()
            def store(row):
                row.words[RankRow.steps.word] = 7
                say("ready")
                os.kill(os.getpid(), signal.SIGKILL)
            row.write(store)
            """,
            page.fd,
            pass_fds=(page.fd,),
        )
        rank.wait()
        snapshot = page.snapshot()
        assert snapshot["ranks"][1]["torn"] == "by a dead writer"
        assert (snapshot["ranks"][1]["pid"], snapshot["ranks"][1]["steps"]) == (rank.pid, 7)
        assert "torn" not in snapshot["engine"]
        assert "torn" not in snapshot["ranks"][0]

        successor = start(
            """
            row = StatePage(int(sys.argv[1])).rank(1)
            row.claim()
            row.enter("waiting", 1.0)
            say("ready")
            time.sleep(60)
            """,
            page.fd,
            pass_fds=(page.fd,),
        )
        row = page.snapshot()["ranks"][1]
        assert "torn" not in row
        assert (row["pid"], row["phase"], row["steps"]) == (successor.pid, "waiting", 0)


def test_the_page_of_a_dead_engine_is_readable_while_a_rank_lives_and_vanishes_with_it(start: Start) -> None:
    engine = start(
        ENGINE
        + """
import subprocess
page.engine.first_error = "rank 0 is stuck"
script = "import sys, time; from transport.state_page import StatePage; "
script += "page = StatePage(int(sys.argv[1])); page.rank(0).claim(); "
script += "print('ready', flush=True); time.sleep(60)"
rank = subprocess.Popen([sys.executable, "-c", script, str(page.fd)], pass_fds=(page.fd,))
time.sleep(60)
"""
    )
    with StatePage.open(engine.pid) as view:
        rank_pid = view.snapshot()["ranks"][0]["pid"]
    kill(engine)
    try:
        place = locate(engine.pid)
        assert place is not None
        assert place.holders == (rank_pid,)
        with StatePage.open(engine.pid) as view:
            assert view.snapshot()["engine"]["first_error"] == "rank 0 is stuck"
    finally:
        os.kill(rank_pid, signal.SIGKILL)
    assert gone_within_5_s(engine.pid)


def test_no_reader_sees_half_a_write_of_a_busy_writer_that_is_killed_again_and_again(start: Start) -> None:
    """Every write stores one number in all fields of a step; two different ones would be half a write."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    reads = torn = 0
    with StatePage.create(num_ranks=0) as page:
        for _ in range(8):
            writer = start(
                """
                page = StatePage(int(sys.argv[1]))
                page.engine.claim()
                names = list(EngineRow.fields)
                names = names[names.index("step_id"):]
                say("ready")
                for number in range(1, 2**40):
                    page.engine.progress(**dict.fromkeys(names, number))
                """,
                page.fd,
                pass_fds=(page.fd,),
            )
            deadline = time.monotonic() + chance.uniform(0.05, 0.3)
            while time.monotonic() < deadline:
                row = page.snapshot()["engine"]
                reads += 1
                if "torn" not in row:  # the writer may have lost the CPU in mid-write
                    assert (
                        len({row["step_id"], row["running"], int(row["last_progress_s"]), row["preemptions"]})
                        == 1
                    )
            kill(writer)
            row = page.snapshot()["engine"]
            assert row["pid"] == writer.pid
            if "torn" in row:
                torn += 1
                assert row["torn"] == "by a dead writer"
            else:
                assert row["step_id"] == row["preemptions"] > 0
    print(f"{reads} reads, {torn} writers of 8 killed in mid-write")


SYSTEM_CALLS = {"x86_64": (1, 231), "aarch64": (64, 94)}  # write, exit_group


@pytest.mark.skipif(platform.machine() not in SYSTEM_CALLS, reason="system call numbers of this machine")
def test_reading_makes_no_system_call() -> None:
    """The reader has the kernel kill it at any system call but write and exit, and then reads."""
    with StatePage.create(num_ranks=4) as page:
        page.engine.claim()
        page.engine.model = "mock"
        script = """
            import ctypes, gc, struct
            view = StatePage.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}")
            gc.disable()
            for _ in range(1000):
                view.snapshot()
            program = b"".join(
                struct.pack("=HBBI", *instruction)
                for instruction in [
                    (0x20, 0, 0, 0),  # load the number of the call
                    (0x15, 2, 0, int(sys.argv[3])),
                    (0x15, 1, 0, int(sys.argv[4])),
                    (0x06, 0, 0, 0x80000000),  # SECCOMP_RET_KILL_PROCESS
                    (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
                ]
            )
            buffer = ctypes.create_string_buffer(program)
            pointer = ctypes.create_string_buffer(struct.pack("@HP", 5, ctypes.addressof(buffer)))
            prctl = ctypes.CDLL(None, use_errno=True).prctl
            # PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
            if prctl(38, 1, 0, 0, 0) != 0 or prctl(22, 2, pointer, 0, 0) != 0:
                sys.exit(77)
            for _ in range(1000):
                snapshot = view.snapshot()
            os.write(1, snapshot["engine"]["model"].encode())
            os._exit(0)
        """
        arguments = map(str, (os.getpid(), page.fd, *SYSTEM_CALLS[platform.machine()]))
        reader = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *arguments],
            capture_output=True,
            timeout=30,
        )
    if reader.returncode == 77:
        pytest.skip("this kernel has no seccomp filters")
    assert (reader.returncode, reader.stdout) == (0, b"mock")
