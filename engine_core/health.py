"""Is the engine alive, is it ready, does it get on: three questions with three answers, from the state page
alone.

`live` fails: restart it. `ready` fails: send it nothing. `progress` fails: it has work and does not get on
with it; the reason says who is waited for. All work on the page of a hung or dead engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transport.processes import ProcessIdentity, what_keeps_it

Row = Mapping[str, Any]
Snapshot = Mapping[str, Any]  # `PageView.snapshot`

HEARTBEAT_LIMIT_S = 10.0  # beats come every second
STALL_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is a sentence for an operator, also when all is well."""

    ok: bool
    reason: str


def live(snapshot: Snapshot, now_s: float, *, heartbeat_limit_s: float = HEARTBEAT_LIMIT_S) -> Verdict:
    """Whether the engine process exists and runs. `now_s` is the host's monotonic clock."""
    engine = snapshot["engine"]
    if not engine["pid"]:
        return Verdict(False, "the engine has not begun to start")
    if not ProcessIdentity(engine["pid"], engine["start_ticks"]).is_alive():
        return Verdict(False, f"the engine process {engine['pid']} has ended{_cause(engine)}")
    if engine["phase"] in ("failed", "stopped"):
        return Verdict(False, f"the engine has {engine['phase']}{_cause(engine)}")
    silent_s = now_s - engine["heartbeat_s"]
    if engine["heartbeat_s"] and silent_s > heartbeat_limit_s:
        return Verdict(
            False,
            f"the engine process {engine['pid']} shows no sign of life for {silent_s:.0f} s: "
            "it is stopped, or a call in it does not give the interpreter back",
        )
    return Verdict(True, f"the engine process {engine['pid']} runs, phase {engine['phase']}")


def ready(snapshot: Snapshot, now_s: float, *, heartbeat_limit_s: float = HEARTBEAT_LIMIT_S) -> Verdict:
    """Whether requests sent now are served."""
    verdict = live(snapshot, now_s, heartbeat_limit_s=heartbeat_limit_s)
    if not verdict.ok:
        return verdict
    engine = snapshot["engine"]
    if engine["phase"] != "ready":
        return Verdict(False, f"the engine is {engine['phase']}")
    if engine["weight_status"] == "FAILED":
        return Verdict(False, "an update of the weights failed half-way: update them again, or restore them")
    if engine["sleep_level"]:
        return Verdict(False, f"the engine sleeps at level {engine['sleep_level']}: wake it up")
    if engine["pause"] != "running":
        return Verdict(False, f"the scheduler is paused ({engine['pause']}): resume it")
    for what, name in (("weights", "weight_status"), ("KV cache", "kv_status")):
        if engine[name] != "NORMAL":
            mend = ": wake it up" if engine[name] == "CLEARED" else ""
            return Verdict(False, f"the {what} cannot be used ({engine[name]}){mend}")
    return Verdict(True, "the engine takes requests")


def progress(snapshot: Snapshot, now_s: float, *, stall_limit_s: float = STALL_LIMIT_S) -> Verdict:
    """Whether the engine gets on with the work it has; having none is fine."""
    engine, ranks = snapshot["engine"], snapshot["ranks"]
    if engine["phase"] in ("failed", "stopped"):
        return Verdict(False, f"the engine has {engine['phase']}{_cause(engine)}")
    if engine["phase"] not in ("ready", "draining"):
        return Verdict(True, f"the engine is {engine['phase']}")
    if not engine["awake_since_s"]:
        held = engine["running"] + engine["waiting"] + engine["deferred"]
        if not held:
            return Verdict(True, "nothing to do")
        why = "asleep: wake it up" if engine["sleep_level"] else "paused: resume it"
        return Verdict(True, f"{held} request(s) wait, and it is {why}")
    idle_s = now_s - max(engine["last_progress_s"], engine["awake_since_s"])
    if idle_s <= stall_limit_s:
        return Verdict(True, f"at step {engine['step_id']}, {idle_s:.1f} s ago")
    if engine["in_flight"]:
        return Verdict(
            False,
            f"{engine['in_flight']} step(s) up to {engine['step_id']} are with the ranks "
            f"and nothing came back for {idle_s:.0f} s: {whom(ranks, now_s)}",
        )
    return Verdict(
        False,
        f"the main loop of process {engine['pid']} has not gone round for {idle_s:.0f} s, with "
        f"{engine['running']} requests running and {engine['waiting'] + engine['deferred']} waiting: "
        f"{whom(ranks, now_s)}",
    )


def whom(ranks: Sequence[Row], now_s: float) -> str:
    """Which ranks the engine waits for: those that are gone, stopped or busy, with what, for how long."""
    words = []
    held_up: dict[int, list[int]] = {}  # by the rank that the others wait for in a collective
    for rank, row in enumerate(ranks):
        if row.get("waits_for") and row["phase"] == "running":
            held_up.setdefault(row["waits_for"] - 1, []).append(rank)
    waiting = [rank for others in held_up.values() for rank in others]
    for rank, row in enumerate(ranks):
        who = f"rank {rank} (pid {row['pid']})"
        if not row["pid"] or not ProcessIdentity(row["pid"], row["start_ticks"]).is_alive():
            words.append(f"{who} has ended")
            continue
        what = f"in {row['method']}" if row["phase"] == "running" else row["phase"]
        if is_stopped(row["pid"]):
            what = f"stopped while {what}"
        elif row["phase"] == "waiting" or rank in waiting:
            continue
        sentence = f"{who} is {what} for {now_s - row['since_s']:.0f} s"
        if others := held_up.get(rank):
            sentence += f", and others wait for it: {', '.join(map(str, others))}"
        words.append(sentence)
    if not words and waiting:
        return f"the ranks {', '.join(map(str, waiting))} wait for each other in a collective"
    return "; ".join(words) or "all ranks wait for a call"


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger."""
    return what_keeps_it(pid).startswith(("T", "t"))


def _cause(engine: Row) -> str:
    if not engine["first_error"]:
        return ""
    if engine["phase"] == "failed":
        return f": {engine['first_error']}"
    return f" (before, it had got over: {engine['first_error']})"
