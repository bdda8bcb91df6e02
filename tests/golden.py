"""Drives our scheduler through a recorded workload, and writes down its decisions as the recording does.

The format, and the loop, are described in tests/data/golden/README.md.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine_core.config import EngineConfig
from engine_core.protocol import FinishReason, SchedulerStats
from engine_core.request import Request
from engine_core.scheduler.running import InFlightStep
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.sampling_params import RepetitionDetectionParams, SamplingParams
from executor.step import LoRARequest, ModelRunnerOutput, SchedulerOutput

Line = dict[str, Any]
DATA = Path(__file__).parent / "data"


def load(path: Path) -> tuple[Line, list[Line]]:
    """The workload and the recorded steps."""
    with gzip.open(path, "rt") as file:
        workload, *steps = (json.loads(line) for line in file)
    return workload, steps


def make_scheduler(config: Line) -> Scheduler:
    known = {name: value for name, value in config.items() if name != "num_gpu_blocks"}
    return Scheduler(EngineConfig(**known), config["num_gpu_blocks"], config["max_model_len"])


def make_request(spec: Line, arrival: int, scheduler: Scheduler) -> Request:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=spec["max_tokens"],
        eos_token_id=spec.get("eos_token_id"),
        stop_token_ids=spec.get("stop_token_ids"),
        min_tokens=spec.get("min_tokens", 0),
    )
    if "repetition_detection" in spec:
        largest, smallest, count = spec["repetition_detection"]
        params.repetition_detection = RepetitionDetectionParams(
            max_pattern_size=largest, min_pattern_size=min(smallest, largest), min_count=count
        )
    lora = spec.get("lora")
    return Request(
        spec["id"],
        np.array(spec["prompt"], np.int32),
        params,
        priority=spec.get("priority", 0),
        arrival_time=float(arrival),
        cache_salt=spec.get("cache_salt"),
        lora=LoRARequest(f"l{lora}", lora, f"/p{lora}") if lora else None,
        block_hasher=scheduler.hasher,
    )


def _positions(scheduler: Scheduler, record: InFlightStep) -> list[int | None]:
    """Which of its outputs each row of a step just scheduled samples; None for a prompt chunk."""
    positions: list[int | None] = []
    for request in record.requests:
        row = scheduler.batch.row(scheduler.batch.requests.index(request))
        output = row.known - request.num_prompt_tokens
        positions.append(None if row.chunk else output + max(0, row.placeholders - 1))
    return positions


def _stats(stats: SchedulerStats) -> list[Any]:
    return [
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        stats.num_skipped_waiting_reqs,
        round(stats.kv_cache_usage, 9),
        *msgspec.structs.astuple(stats.prefix_cache_stats)[:7],
    ]


def _operate(scheduler: Scheduler, operation: str, line: Line) -> None:
    """Something other than an arrival or an abort happens between two steps."""
    if operation.startswith("reset"):
        line["reset"] = scheduler.reset_prefix_cache(reset_running=operation == "reset_running")
    else:
        states = {
            "pause_new": PauseState.PAUSED_NEW,
            "pause_all": PauseState.PAUSED_ALL,
            "unpause": PauseState.UNPAUSED,
        }
        scheduler.set_pause_state(states[operation])


def run(
    workload: Line,
    after_step: Callable[[Scheduler], None] | None = None,
    scheduler: Scheduler | None = None,
) -> list[Line]:
    """The decisions of `scheduler` (default: a new one) on a workload."""
    config = workload["config"]
    scheduler = scheduler or make_scheduler(config)
    specs = {spec["id"]: spec for spec in workload["requests"]}
    to_come = sorted(workload["requests"], key=lambda spec: spec["arrive_step"])
    aborts = sorted((spec["abort_step"], spec["id"]) for spec in workload["requests"] if "abort_step" in spec)
    operations: list[tuple[int, str]] = list(workload.get("ops", ()))
    depth = 2 if config["async_scheduling"] else 1
    in_flight: list[tuple[SchedulerOutput, list[str], list[int | None]]] = []
    lines: list[Line] = []
    announced: dict[str, int] = {}  # preemptions of each request up to the last step
    arrival = 0

    def collect(line: Line) -> None:
        step, ids, positions = in_flight.pop(0)
        tokens = np.zeros((len(ids), 1), np.int32)
        for i, (id_, position) in enumerate(zip(ids, positions, strict=True)):
            outputs = specs[id_]["outputs"]
            if position is not None:
                tokens[i] = outputs[position] if position < len(outputs) else 7
        sampled = np.array([position is not None for position in positions], np.int32)
        result = scheduler.update_from_output(step, ModelRunnerOutput(step.step_id, tokens, sampled))
        for client in result.values():
            for request, token in zip(client.requests, client.token_ids.tolist(), strict=True):
                line.setdefault("tokens", {})[request.request_id] = [token]
            if client.scheduler_stats is not None:
                line.setdefault("sched", []).append(_stats(client.scheduler_stats))
            for output in client.outputs:
                extras = line.setdefault("stats", {})
                if output.prefill_stats is not None:
                    extras[output.request_id] = list(msgspec.structs.astuple(output.prefill_stats))
                if output.events is not None:
                    extras[output.request_id + "/e"] = [int(event.type) for event in output.events]
                line.setdefault("tokens", {})[output.request_id] = output.new_token_ids
                if output.finish_reason is not None:
                    reason = [str(output.finish_reason), output.stop_reason]
                    line.setdefault("finished", {})[output.request_id] = reason

    while to_come or scheduler.has_requests() or in_flight or operations:
        line: Line = {"step": len(lines)}
        while to_come and to_come[0]["arrive_step"] <= len(lines):
            scheduler.add_request(make_request(to_come.pop(0), arrival, scheduler))
            arrival += 1
        while aborts and aborts[0][0] <= len(lines):
            id_ = aborts.pop(0)[1]
            if scheduler.finish_requests([id_], FinishReason.ABORT):
                line.setdefault("aborted", []).append(id_)
        while operations and operations[0][0] <= len(lines):
            _operate(scheduler, operations.pop(0)[1], line)
        if scheduler.has_requests():
            step = scheduler.schedule()
            record = scheduler.batch.in_flight[-1]
            ids = [request.request_id for request in record.requests]
            line["scheduled"] = dict(zip(ids, step.num_scheduled_tokens.tolist(), strict=True))
            line["computed_before"] = dict(zip(ids, step.num_computed_tokens.tolist(), strict=True))
            preempted = [
                request.request_id
                for request in scheduler.requests.values()
                if request.num_preemptions > announced.get(request.request_id, 0)
            ]
            if preempted:
                line["preempted"] = sorted(preempted)
            announced = {r.request_id: r.num_preemptions for r in scheduler.requests.values()}
            in_flight.append((step, ids, _positions(scheduler, record)))
            while in_flight and (len(in_flight) >= depth or not len(step.slots)):
                collect(line)
        elif in_flight:
            collect(line)
        line["running"] = [request.request_id for request in scheduler.batch.requests]
        line["waiting"] = scheduler.num_waiting
        line["free_blocks"] = scheduler.kv.pool.num_free
        lines.append(line)
        if after_step is not None:
            after_step(scheduler)
    return lines


def differences(expected: list[Line], actual: list[Line]) -> list[str]:
    """What differs, a sentence each. Order counts where it is a decision: of rows in a step, of running
    requests.
    """
    found: list[str] = []
    if len(expected) != len(actual):
        found.append(f"{len(actual)} steps instead of {len(expected)}")
    for want, got in zip(expected, actual, strict=False):
        recorded = {*want, *got} - ({*got} & {"stats", "sched"} - {*want})  # not in every recording
        for name in sorted(recorded):
            a, b = want.get(name) or None, got.get(name) or None
            same = list(a.items()) == list(b.items()) if name == "scheduled" and a and b else a == b
            if not same:
                found.append(f"step {want['step']}: {name} is {b}, vLLM has {a}")
    return found
