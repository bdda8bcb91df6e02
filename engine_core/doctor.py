"""Says in words what is wrong with a host or an engine, and what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_core import health
from transport.processes import ProcessIdentity
from transport.state_page import PageLocation

MIN_KERNEL = (5, 3)  # pidfd_open
MIN_FILES = 1024  # descriptors: some for each rank and each client
MIN_FREE_MEMORY_BYTES = 256 << 20
_PACKAGES = ("pyzmq", "msgspec", "numpy", "uvloop")
_LONG_CALL_S = 10.0


class Level(Enum):
    GOOD = "ok"
    ODD = "odd"  # worth knowing
    BAD = "bad"  # to be mended


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


def examine_host() -> Iterator[Finding]:
    """What an engine needs of the system."""
    yield _kernel()
    yield _versions()
    yield _files_limit()
    yield _memory()
    yield _shared_memory()


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < MIN_KERNEL:
        least = ".".join(map(str, MIN_KERNEL))
        return Finding(Level.BAD, f"Linux {release} is too old: engine-core needs {least} or later")
    return Finding(Level.GOOD, f"Linux {release}, {os.cpu_count()} CPUs, {_usable_cpus()} of them to be used")


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for package in ("engine-core", *_PACKAGES):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return Finding(Level.BAD, f"{package} is not installed for {sys.executable}")
    return Finding(Level.GOOD, ", ".join(found))


def _files_limit() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_FILES:
        return Finding(
            Level.BAD,
            f"a process may open {soft} files; with many ranks and clients that is not enough: "
            f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}",
        )
    return Finding(Level.GOOD, f"a process may open {soft} files")


def _memory() -> Finding:
    """What is free by the system, and by the control group that we are in."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    where = "on this host"
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        in_group = int(most) - int(used.read_text())
        if in_group < free:
            free, where = in_group, "in this control group"
    text = f"{free / 2**30:.1f} GiB of memory are free {where}"
    if free < MIN_FREE_MEMORY_BYTES:
        return Finding(Level.BAD, f"only {text}; shared memory comes out of that")
    return Finding(Level.GOOD, text)


def _shared_memory() -> Finding:
    """Ours has no names. /dev/shm matters where the kernel has no memfd, and to workers."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding(Level.ODD, "/dev/shm is missing; engine-core does without it, other software may not")
    free = shutil.disk_usage(path).free
    names = sorted(entry.name for entry in path.glob("engine-core*"))
    if names:
        return Finding(Level.BAD, f"/dev/shm holds files that nobody needs: {', '.join(names)}; remove them")
    return Finding(
        Level.GOOD, f"/dev/shm has {free / 2**30:.1f} GiB free, and nothing of engine-core was left in it"
    )


def examine_engine(
    snapshot: Mapping[str, Any], now_s: float, location: PageLocation | None = None
) -> Iterator[Finding]:
    """An engine's state in words. `location` tells who holds the page, if it is not a copy of one."""
    engine, ranks = snapshot["engine"], snapshot["ranks"]
    who = f"engine {engine['pid']}"
    is_alive = ProcessIdentity(engine["pid"], engine["start_ticks"]).is_alive()
    for verdict in (health.live(snapshot, now_s), health.progress(snapshot, now_s)):
        yield Finding(Level.GOOD if verdict.ok else Level.BAD, f"{who}: {verdict.reason}")
    if location is not None and not is_alive and location.holders:
        pids = ", ".join(map(str, location.holders))
        yield Finding(Level.BAD, f"{who}: its ranks outlived it: end the processes {pids}")
    if not is_alive:
        return
    if health.is_stopped(engine["pid"]):
        yield Finding(Level.BAD, f"{who}: the process is stopped: kill -CONT {engine['pid']}")
    yield from _service(who, snapshot, now_s)
    if engine["version"] != version("engine-core"):
        yield Finding(
            Level.ODD, f"{who}: it runs version {engine['version']}, installed is {version('engine-core')}"
        )
    if engine["restarts"]:
        yield Finding(
            Level.ODD,
            f"{who}: its ranks were restarted {engine['restarts']} time(s); the first cause was "
            f"{engine['first_error'] or 'not recorded'}",
        )
    if len(ranks) >= _usable_cpus():
        yield Finding(
            Level.ODD, f"{who}: {len(ranks)} ranks and the engine share {_usable_cpus()} CPUs, and will wait"
        )
    for rank, row in enumerate(ranks):
        yield from _rank(f"{who}, rank {rank} (pid {row['pid']})", row, now_s)


def _service(who: str, snapshot: Mapping[str, Any], now_s: float) -> Iterator[Finding]:
    engine = snapshot["engine"]
    verdict = health.ready(snapshot, now_s)
    yield Finding(Level.GOOD if verdict.ok else Level.ODD, f"{who}: {verdict.reason}")
    if engine["weight_status"] == "FAILED":
        yield Finding(
            Level.BAD,
            f"{who}: an update of its weights failed half-way, so it is paused: engine-core ctl weights, to "
            "update them again, or engine-core ctl restore-weights",
        )
    blocks = engine["blocks_used"] + engine["blocks_free"]
    if blocks and engine["waiting"] and engine["blocks_used"] > 0.95 * blocks:
        yield Finding(
            Level.ODD,
            f"{who}: {engine['waiting']} requests wait while {100 * engine['blocks_used'] / blocks:.0f} % of "
            f"the KV blocks are held; there were {engine['preemptions']} preemptions so far",
        )


def _rank(who: str, row: Mapping[str, Any], now_s: float) -> Iterator[Finding]:
    if row["error"]:
        yield Finding(Level.BAD, f"{who}: {row['error']}")
    if not row["pid"] or not ProcessIdentity(row["pid"], row["start_ticks"]).is_alive():
        return  # `health` has named it
    if health.is_stopped(row["pid"]):
        yield Finding(Level.BAD, f"{who}: the process is stopped: kill -CONT {row['pid']}")
    for_s = now_s - row["since_s"]
    if row["phase"] == "running" and for_s > _LONG_CALL_S:
        yield Finding(
            Level.ODD,
            f"{who}: in {row['method']} for {for_s:.0f} s; py-spy dump --pid {row['pid']} shows where",
        )
