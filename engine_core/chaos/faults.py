"""What can be broken, and what is to be expected of it."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Effect(enum.Enum):
    """What a fault does to the ranks."""

    NONE = 0  # they are not concerned
    RESTART = 1  # they are restarted
    DELAY = 2  # they are late, within their limits


@dataclass(frozen=True, slots=True)
class FaultKind:
    name: str
    effect: Effect
    weight: int = 1  # how often it is drawn
    may_overlap: bool = False  # with a fault whose effect is not over: no request can be blamed for it


KINDS = (
    FaultKind("kill_rank", Effect.RESTART, 6, may_overlap=True),
    FaultKind("freeze_rank", Effect.RESTART, 1),  # SIGSTOP, past the limit of a step
    FaultKind("stop_rank", Effect.DELAY, 2, may_overlap=True),  # SIGSTOP, and SIGCONT soon
    FaultKind("raise", Effect.RESTART, 2),  # in the next step, once
    FaultKind("exit", Effect.RESTART, 2),
    FaultKind("segfault", Effect.RESTART, 2),
    FaultKind("hang", Effect.RESTART, 1),
    FaultKind("garbage", Effect.RESTART, 2),  # an answer that does not fit its step
    FaultKind("slow", Effect.DELAY, 2, may_overlap=True),
    FaultKind("poison", Effect.RESTART, 1),  # a request at which the worker raises, always
    FaultKind("abort", Effect.NONE, 2, may_overlap=True),
    FaultKind("kill_client", Effect.NONE, 2, may_overlap=True),
    FaultKind("stop_client", Effect.NONE, 1, may_overlap=True),  # SIGSTOP, and SIGCONT soon
    FaultKind("rubbish", Effect.NONE, 2, may_overlap=True),  # on the engine's sockets
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """One to be committed, `delay_s` after the one before is over, or has begun if they overlap."""

    kind: FaultKind
    rank: int
    delay_s: float
    overlaps: bool


def plan(rng: random.Random, count: int, num_ranks: int, kinds: Sequence[FaultKind] = KINDS) -> list[Fault]:
    """`count` faults, of all kinds in turn as their weights say."""
    faults = []
    for _ in range(count):
        kind = rng.choices(kinds, [kind.weight for kind in kinds])[0]
        overlaps = kind.may_overlap and rng.random() < 0.25
        faults.append(Fault(kind, rng.randrange(num_ranks), rng.uniform(0.0, 0.1), overlaps))
    return faults
