"""One engine as `engine-core top` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine_core.cli.ps import state
from engine_core.cli.units import age, share, sparkline
from engine_core.health import is_stopped
from transport.processes import ProcessIdentity

if TYPE_CHECKING:
    from engine_core.cli.top import EngineWatch

_LONG_S = 5.0  # in one call: worth a second look
_STUCK_S = 30.0
_MARGINS = 8  # columns of the frame, and between label, value and curve
_GOOD, _WARN, _BAD = "green", "yellow", "bold red"


def picture(watch: EngineWatch, width: int) -> Panel:
    engine = watch.engine
    word = state(watch.snapshot, watch.now_s)
    bad = word in ("dead", "failed", "stuck")
    title = Text.assemble(f"engine {engine['pid']} ", (word, _BAD if bad else _GOOD))
    parts: list[RenderableType] = [_head(watch), _load(watch), _curves(watch, width - _MARGINS)]
    parts += _notices(watch)
    parts.append(_ranks(watch))
    return Panel(Group(*parts), title=title, title_align="left", border_style="red" if bad else "dim")


def _head(watch: EngineWatch) -> Text:
    engine = watch.engine
    words = [engine["model"] or "no model"]
    if engine["started_at_s"]:
        words.append(f"up {age(watch.now_unix_s - engine['started_at_s'])}")
    words.append(f"engine-core {engine['version']}")
    if engine["address"]:
        words.append(engine["address"])
    return Text("   ".join(words), style="dim")


def _load(watch: EngineWatch) -> Text:
    engine = watch.engine
    text = Text.assemble(
        "running ",
        (f"{engine['running']}", "bold"),
        f" of {engine['max_num_seqs']}   waiting ",
        (f"{engine['waiting']}", "bold"),
    )
    for name in ("deferred", "preemptions", "restarts"):
        if engine[name]:
            text.append(f"   {name} {engine[name]}")
    text.append(f"   done {engine['requests_finished']}   step {engine['step_id']}")
    text.append(f" ({watch.step_rate:.1f}/s)   in flight {engine['in_flight']}")
    return text


def _curves(watch: EngineWatch, width: int) -> Table:
    engine = watch.engine
    blocks = engine["blocks_used"] + engine["blocks_free"]
    lines: list[tuple[str, str, Sequence[float], float | None]] = [
        ("generation", _rate(watch.generation_rate), watch.generation_rate, None),
        ("prefill", _rate(watch.prompt_rate), watch.prompt_rate, None),
        (
            "KV blocks",
            f"{share(engine['blocks_used'], blocks)} of {blocks}, {engine['blocks_cached']} cached",
            watch.kv_usage,
            1.0,
        ),
        ("prefix hits", share(watch.hit_rate[-1], 1.0) if watch.hit_rate else "-", watch.hit_rate, 1.0),
    ]
    table = Table.grid(padding=(0, 2))
    room = width - max(len(label) for label, *_ in lines) - max(len(value) for _, value, *_ in lines)
    for label, value, history, most in lines:
        curve = sparkline(list(history), max(room, 1), most)
        table.add_row(label, Text(value, "bold"), Text(curve, "cyan"))
    return table


def _rate(history: Sequence[float]) -> str:
    return f"{history[-1]:,.0f} tokens/s" if history else "-"


def _notices(watch: EngineWatch) -> list[Text]:
    """What is out of the ordinary."""
    engine = watch.engine
    notices = [Text(verdict.reason, _BAD) for verdict in watch.verdicts() if not verdict.ok]
    if engine["first_error"] and not any(engine["first_error"] in notice.plain for notice in notices):
        notices.append(Text(f"first error: {engine['first_error']}", _WARN))
    states = []
    if engine["pause"] != "running":
        states.append(f"paused ({engine['pause']})")
    if engine["sleep_level"]:
        states.append(f"asleep at level {engine['sleep_level']}")
    for what, name in (("weights", "weight_status"), ("KV cache", "kv_status")):
        if engine[name] != "NORMAL":
            states.append(f"{what} {engine[name]}")
    if engine["weight_version"] not in ("", "default"):
        states.append(f"weights of version {engine['weight_version']}")
    if states:
        notices.append(Text(", ".join(states), _WARN))
    if "torn" in engine:
        notices.append(Text(f"the engine's row may mix two moments: {engine['torn']}", _WARN))
    return notices


def _ranks(watch: EngineWatch) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("RANK", "PID", "DOES", "FOR", "STEPS", "LAST STEP", "HEARTBEAT"):
        table.add_column(name)
    for rank, row in enumerate(watch.ranks):
        what, style = _does(row, watch.now_s)
        beat_s = row["heartbeat_s"]
        table.add_row(
            str(rank),
            str(row["pid"] or "-"),
            Text(what, style),
            Text(age(watch.now_s - row["since_s"]) if row["since_s"] else "-", style),
            str(row["steps"]),
            f"{1000 * row['last_step_s']:.1f} ms" if row["steps"] else "-",
            age(watch.now_s - beat_s) if beat_s else "-",
        )
    return table


def _does(row: Mapping[str, Any], now_s: float) -> tuple[str, str]:
    """What a rank does, and a style that says whether that is well."""
    if not row["pid"]:
        return "not started", "dim"
    if not ProcessIdentity(row["pid"], row["start_ticks"]).is_alive():
        return f"has ended{': ' + row['error'] if row['error'] else ''}", _BAD
    if row["error"]:
        return f"failed: {row['error']}", _BAD
    what = row["phase"]
    if what == "running":
        what = f"in {row['method']}"
        if row["method"] == "execute_model":
            what += f" of step {row['step_id']}"
        if waits_for := row.get("waits_for"):
            return f"{what}, waits for rank {waits_for - 1}", "dim"
    for_s = now_s - row["since_s"]
    style = ""
    if row["phase"] == "waiting":
        style = "dim"
    elif row["phase"] == "running":
        style = _BAD if for_s > _STUCK_S else _WARN if for_s > _LONG_S else ""
    if is_stopped(row["pid"]):
        return f"stopped while {what}", _BAD
    return what, style
