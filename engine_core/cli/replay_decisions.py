"""Run the scheduler on a record that `serve --record` wrote, without workers, and compare its decisions.

Prints what was replayed, and the first difference if there is one: then the exit status is 1, as for a record
that is truncated. A record names the scheduler class that is run, so that only a trusted one should be
replayed if it names one (--scheduler-cls of the engine).
"""

from __future__ import annotations

import argparse
import code

from engine_core.cli.messages import say
from engine_core.cli.parser import Parser, positive_integer
from engine_core.lab.decision_replay import DecisionReplay, Difference, GapError
from engine_core.lab.record import RecordError, RecordReader


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Replay")
    group.add_argument("record", metavar="FILE", help="a file of the record")
    group.add_argument(
        "--until", type=positive_integer, metavar="STEP", help="stop when this step is planned (default: all)"
    )
    group.add_argument(
        "--shell",
        action="store_true",
        help="open a Python prompt on the scheduler where the replay stopped: at --until, at the first "
        "difference, or at the end",
    )


def run(parser: Parser, args: argparse.Namespace) -> int:
    reader = RecordReader(args.record)
    header = reader.header
    say(
        f"{args.record}: part {header.part} of a record by engine-core {header.engine_version}, "
        f"{header.capacity.num_gpu_blocks} blocks of {header.config.block_size}"
        + (f", scheduler {header.config.scheduler_cls}" if header.config.scheduler_cls else "")
    )
    replay = DecisionReplay(header)
    trouble: Exception | None = None
    try:
        replay.run(reader.entries(), args.until)
    except (Difference, GapError, RecordError) as error:
        trouble = error
    finally:
        reader.close()
    print(summary(replay), flush=True)
    if trouble is not None:
        print(trouble, flush=True)
    else:
        print("all decisions are identical", flush=True)
    if args.shell:
        open_shell(replay)
    return 0 if trouble is None else 1


def summary(replay: DecisionReplay) -> str:
    """What was replayed, in one line."""
    did = replay.progress
    at = "no step" if replay.step is None else f"step {replay.step.step_id}"
    return (
        f"replayed {did.steps:,} steps up to {at}: {did.requests:,} requests, {did.refused:,} refused, "
        f"{did.finished:,} ended from outside, {did.preemptions:,} preemptions, {did.resets:,} cache resets, "
        f"{did.restarts:,} restarts of the workers"
    )


def open_shell(replay: DecisionReplay) -> None:
    """A Python prompt with the state at hand."""
    names = {
        "replay": replay,
        "scheduler": replay.scheduler,
        "step": replay.step,
        "requests": replay.scheduler.requests,
    }
    code.interact(
        banner="replay, scheduler, requests (by id) and step (the last one planned); Ctrl-D ends",
        local=names,
        exitmsg="",
    )
