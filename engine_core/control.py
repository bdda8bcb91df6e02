"""What front ends, operators and training loops ask of the engine besides generation.

Names and meanings are vLLM 0.33's where it has the method. Who changes something is logged, and everything
that is set here is shown in the state page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from engine_core import logs
from engine_core.core import EngineCore
from engine_core.outputs import StepOutputs, finish_outputs
from engine_core.protocol import Array, FinishReason, OutputError
from engine_core.scheduler.explain import explain
from engine_core.scheduler.scheduler import PauseState
from engine_core.utility import Deferred, UtilityMethods, utility
from engine_core.weights import Weights
from executor.errors import WorkerTimeout
from executor.step import LoRARequest

logger = logging.getLogger("engine_core")

PauseMode = Literal["abort", "wait", "keep"]
WAKE_TAGS = ("weights", "kv_cache")

_PAUSED = OutputError("engine_paused", "Generation is paused. Please retry after it resumes.", True)
_DRAINING = OutputError("engine_draining", "The engine takes no new requests. Please try another one.", True)
_WEIGHTS_FAILED = OutputError(
    "weights_undefined", "An update of the weights failed half-way. Please retry when it was mended.", True
)
_PAGE_PAUSE = {
    PauseState.UNPAUSED: "running",
    PauseState.PAUSED_NEW: "no new requests",
    PauseState.PAUSED_ALL: "frozen",
}


class _AwaitsIdle(NamedTuple):
    """A call that is answered once no step has anything to do."""

    answer: Deferred
    action: Callable[[], None]
    all_ended: bool  # and no request is left, not even a frozen one
    outlasts_resume: bool  # else there is nothing to wait for any more when requests go on


class EngineControl(UtilityMethods):
    """The methods, and the state that they set. All of it belongs to the thread of the step loop.

    `emit(outputs)` sends outputs that no step has made.
    """

    def __init__(self, core: EngineCore, emit: Callable[[StepOutputs], None]) -> None:
        super().__init__()
        self._core = core
        self._scheduler = core.scheduler
        self._emit = emit
        self.weights = Weights(core)
        self._kv_status = "NORMAL"
        self._most_tokens = core.scheduler.budget
        self._pause_wanted = False  # by a user; an update of the weights pauses for itself
        self._rejects_new_requests = False  # nor does the user want new ones queued
        self._is_draining = False
        self._asleep: set[str] = set()  # of WAKE_TAGS
        self._sleep_level = 0
        self._loras: dict[int, LoRARequest] = {}
        self._await_idle: list[_AwaitsIdle] = []

    @property
    def refusal(self) -> OutputError | None:
        """Why new requests are not taken, if so."""
        if self.weights.are_undefined:
            return _WEIGHTS_FAILED
        if self._is_draining:
            return _DRAINING
        return _PAUSED if self._rejects_new_requests else None

    def notify_idle(self) -> None:
        """The step loop has run dry."""
        calls, self._await_idle = self._await_idle, []
        for call in calls:
            if call.all_ended and self._scheduler.requests:
                self._await_idle.append(call)
            else:
                call.answer.settle(call.action)

    @property
    def waits_for_idle(self) -> bool:
        return bool(self._await_idle)

    def abort_all(self) -> None:
        """End every request, with an output that says so."""
        self._emit(finish_outputs(self._scheduler.finish_requests(None, FinishReason.ABORT)))

    def called(self) -> None:
        """Whoever is answered finds in the page what the call has changed."""
        self._show()
        if self._core.report is not None:
            self._core.report.refresh()

    # About the engine.

    @utility
    def get_supported_tasks(self) -> list[str]:
        return ["generate"]

    @utility
    def get_counters(self) -> dict[str, int]:
        """Of the scheduler, since the start; whoever wants a rate compares two looks."""
        return {
            "steps": self._scheduler.num_executed_steps,
            **msgspec.to_builtins(self._scheduler.counters),
        }

    @utility
    def explain(self, request_id: str) -> dict[str, Any]:
        """Where a live or lately ended request stands: an `Explanation` as a map."""
        answer: dict[str, Any] = msgspec.to_builtins(explain(self._scheduler, request_id))
        return answer

    @utility
    def get_kv_cache_hashes(self) -> list[bytes]:
        """Names of the contents that the prefix cache holds, for a copy of the index to be checked."""
        return self._scheduler.kv.pool.names()

    # Pausing.

    @utility
    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Deferred | None:
        """As `pause_scheduler`; with "abort" and "wait" new requests are refused until `resume_scheduler`."""
        result = self.pause_scheduler(mode, clear_cache)
        self._rejects_new_requests = mode != "keep"
        return result

    @utility
    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Deferred | None:
        """Stop running requests; new ones queue. Answers when nothing runs any more.

        "abort" ends all requests, "wait" lets the running ones finish, "keep" freezes them.
        """
        logger.info("pause (%s), asked by %s", mode, self.caller)
        answer = self._pause(mode, self._clear_caches if clear_cache else lambda: None)
        self._pause_wanted = True
        return answer

    def _pause(self, mode: PauseMode, then: Callable[[], None]) -> Deferred | None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"invalid pause mode {mode!r}: one of {', '.join(get_args(PauseMode))}")
        if mode == "abort":
            self.abort_all()
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        self._show()
        return self._after_idle(then)

    @utility
    def resume_scheduler(self) -> None:
        """Go on, and take new requests. A pause, sleep, update or drain that is not complete fails.

        Raises `WeightsUndefined` after a failed update of the weights, RuntimeError while workers sleep.
        """
        self.weights.check()
        if self._asleep:
            raise RuntimeError(
                f"{' and '.join(sorted(self._asleep))} are asleep: wake them up, and requests go on"
            )
        if self.is_scheduler_paused() or self._is_draining:
            logger.info("resume, asked by %s", self.caller)
        calls, self._await_idle = self._await_idle, []
        for call in calls:
            if call.outlasts_resume:
                self._await_idle.append(call)
            else:
                call.answer.resolve(
                    error=RuntimeError(f"requests go on before it was done, by {self.caller}")
                )
        self._pause_wanted = self._rejects_new_requests = self._is_draining = False
        self._scheduler.set_pause_state(PauseState.UNPAUSED)

    @utility
    def is_scheduler_paused(self) -> bool:
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    @utility
    def drain(self) -> Deferred | None:
        """Refuse new requests, and answer when all that are here have ended. `resume_scheduler` undoes it."""
        if self.is_scheduler_paused():
            raise RuntimeError("the scheduler is paused, so its requests do not end: resume it first")
        logger.info("drain, asked by %s", self.caller)
        self._is_draining = True
        self._show()
        return self._after_idle(lambda: None, all_ended=True)

    # Sleeping.

    @utility
    def is_sleeping(self) -> bool:
        """Paused or asleep."""
        return self.is_scheduler_paused() or bool(self._asleep)

    @utility
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Deferred | None:
        """Level 0 pauses; 1 has the workers put weights aside and drop the KV cache; 2 has them drop both.

        Answers when they have.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level {level} is not 0, 1 or 2")
        if level and not self._core.config.enable_sleep_mode:
            raise RuntimeError("sleep mode is off; the engine has to be started with --enable-sleep-mode")
        self.weights.check()
        logger.info("sleep at level %d, asked by %s", level, self.caller)
        paused = self.pause_scheduler(mode, clear_cache=level > 0)
        if level == 0:
            return paused
        if paused is not None:
            return paused.then(lambda: self._put_to_sleep(level))
        self._put_to_sleep(level)
        return None

    def _put_to_sleep(self, level: int) -> None:
        if self._asleep:
            return
        # Should a rank fail at it, some sleep: `wake_up` is the way back, and says so in the page.
        self._asleep.update(WAKE_TAGS)
        self._sleep_level = level
        self.weights.status = self._kv_status = "CLEARING"
        self._show()
        self._core.executor.collective_rpc("sleep", args=(level,))
        self.weights.status = self._kv_status = "CLEARED"
        logger.info("asleep at level %d", level)

    @utility
    def release_kv_cache_memory(self) -> None:
        """Have the workers drop the KV cache, and nothing else, until `wake_up` with "kv_cache".

        Raises RuntimeError unless a pause is complete and nothing is asleep. Kept requests are computed anew.
        """
        if not self.is_scheduler_paused() or self._core.has_work:
            raise RuntimeError("release_kv_cache_memory needs a completed pause first")
        if self._asleep:
            raise RuntimeError("release_kv_cache_memory needs all of the workers' memory to be there")
        logger.info("the KV cache is released, asked by %s", self.caller)
        self._clear_caches()
        self._asleep.add("kv_cache")
        self._kv_status = "CLEARING"
        self._show()
        self._core.executor.collective_rpc("release_kv_cache")
        self._kv_status = "CLEARED"

    @utility
    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, for all or some of "weights", "kv_cache", "scheduling". True once fully awake."""
        unknown = set(tags or ()) - {*WAKE_TAGS, "scheduling"}
        if unknown:
            raise ValueError(f"unknown wake-up tags: {', '.join(sorted(unknown))}")
        wanted = None if tags is None else [tag for tag in tags if tag in WAKE_TAGS]
        logger.info("wake up (%s), asked by %s", "all" if tags is None else ", ".join(tags), self.caller)
        if self._asleep and (wanted is None or wanted):
            self._core.executor.collective_rpc("wake_up", args=(wanted,))
            self._asleep.difference_update(WAKE_TAGS if wanted is None else wanted)
            if "weights" not in self._asleep:
                self.weights.status = "NORMAL"
            if "kv_cache" not in self._asleep:
                self._kv_status = "NORMAL"
        if not self._asleep:
            self._sleep_level = 0
            self.resume_scheduler()
        return not self._asleep

    # Weights.

    @utility
    def get_weight_version(self) -> str:
        return self.weights.version

    @utility
    def set_weight_version(self, weight_version: str) -> None:
        """Name the weights, after an update by `collective_rpc` for example. Outputs are stamped with it."""
        self.weights.version = weight_version
        logger.info("the weights are called version %s, asked by %s", weight_version, self.caller)

    @utility
    def update_weights(
        self,
        weight_version: str,
        path: str | None = None,
        tensors: dict[str, Array] | None = None,
        options: dict[str, Any] | None = None,
        mode: PauseMode = "keep",
    ) -> Deferred | None:
        """Pause, have every rank update its weights, name them, drop what was computed with the old ones, and
        go on; answers then.

        `path`, `tensors` by name and `options` reach `Worker.update_weights` as one map. Requests that are
        kept are computed anew. If a rank fails, the engine stays paused with weight status FAILED, and takes
        no requests, until an update succeeds or `restore_weights` does. If it was paused before, it stays so.
        """
        if not weight_version:
            raise ValueError("weight_version is empty; outputs could not tell what they come from")
        if path is None and tensors is None and not options:
            raise ValueError("nothing to update the weights from: neither path nor tensors nor options")
        if "weights" in self._asleep:
            raise RuntimeError("the weights are asleep: wake them up first")
        update = dict(options or {})
        if path is not None:
            update["path"] = path
        if tensors is not None:
            update["tensors"] = tensors
        logger.info("update of the weights to version %s, asked by %s", weight_version, self.caller)

        def apply() -> None:
            if "weights" in self._asleep:
                raise RuntimeError("the weights were put to sleep before: wake them up first")
            if not self.is_scheduler_paused():  # an update before this one has gone on
                self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self.weights.update(weight_version, update, self._show)
            self._clear_caches()
            if not self._pause_wanted:
                self._scheduler.set_pause_state(PauseState.UNPAUSED)

        if self.is_scheduler_paused() and not self._core.has_work:
            apply()
            return None
        return self._pause(mode, apply)

    @utility
    def restore_weights(self) -> Deferred:
        """Go back to the last version that was complete: restart the ranks, and repeat the updates that led
        to it. Answers when they are up; requests go on if a failed update kept them from it.

        Raises RuntimeError if that cannot be had, because an update came from tensors, which are not kept.
        """
        lost = self._core.executor.lost_call
        if lost is not None:
            raise RuntimeError(f"the ranks cannot be restarted: what {lost} did to them cannot be repeated")
        logger.info("the ranks are restarted to restore the weights, asked by %s", self.caller)
        failed = self.weights.failed
        self._core.restart_workers()

        def restored() -> None:
            self.weights.check()
            if failed is not None and not self._pause_wanted:
                self._scheduler.set_pause_state(PauseState.UNPAUSED)

        deferred = self._after_idle(restored, outlasts_resume=True)
        assert deferred is not None  # a restart is work
        return deferred

    # Adapters.

    @utility
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have the workers load an adapter; False if they had it."""
        known = self._loras.get(lora_request.int_id)
        if known is not None and (known.name, known.path) != (lora_request.name, lora_request.path):
            raise ValueError(f"id {lora_request.int_id} is that of adapter {known.name} from {known.path}")
        added = self._agreed("add_lora", lora_request)
        self._loras[lora_request.int_id] = lora_request
        logger.info("adapter %s loaded, asked by %s", lora_request.name, self.caller)
        return added

    @utility
    def remove_lora(self, lora_id: int) -> bool:
        """Have the workers forget an adapter; False if they did not have it.

        Raises RuntimeError while requests use it.
        """
        adapters = [request.lora for request in self._scheduler.requests.values() if request.lora is not None]
        users = sum(lora.int_id == lora_id for lora in adapters)
        if users:
            raise RuntimeError(f"adapter {lora_id} is in use by {users} live request(s)")
        removed = self._agreed("remove_lora", lora_id)
        logger.info("adapter %d removed, asked by %s", lora_id, self.caller)
        self._loras.pop(lora_id, None)
        return removed

    @utility
    def pin_lora(self, lora_id: int) -> bool:
        """Keep the workers from evicting an adapter."""
        return self._agreed("pin_lora", lora_id)

    @utility
    def list_loras(self) -> list[int]:
        """Ids of the adapters that all workers have loaded."""
        lists: list[list[int]] = self._core.executor.collective_rpc("list_loras")
        return sorted(set[int].intersection(*map(set, lists)))

    def _agreed(self, method: str, argument: Any) -> bool:
        """Of a call that all ranks must answer alike."""
        if not self._scheduler.limits.max_loras:
            raise RuntimeError("adapters are not enabled on this engine (--enable-lora)")
        answers: list[bool] = self._core.executor.collective_rpc(method, args=(argument,))
        if len(set(answers)) > 1:
            raise RuntimeError(f"the ranks do not agree on {method}: {answers}")
        return answers[0]

    # Limits.

    @utility
    def get_limits(self) -> dict[str, int]:
        """Those that `set_limits` sets."""
        return {
            "max_num_seqs": self._scheduler.max_running,
            "max_num_batched_tokens": self._scheduler.budget,
        }

    @utility
    def set_limits(
        self, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
    ) -> dict[str, int]:
        """Change how many requests run at the same time, and how many tokens a step computes; returns what
        holds then.

        Neither may exceed what the engine was started with, which the workers have room for. Requests that
        run already go on.
        """
        before, config = self.get_limits(), self._core.config
        seqs = before["max_num_seqs"] if max_num_seqs is None else max_num_seqs
        tokens = max_num_batched_tokens
        if tokens is None:
            tokens = before["max_num_batched_tokens"]
        if not 1 <= seqs <= config.max_num_seqs:
            raise ValueError(f"max_num_seqs = {seqs} is not from 1 to {config.max_num_seqs}")
        least = min(seqs, self._most_tokens)  # a token for each; fewer, if it was started with fewer
        if not least <= tokens <= self._most_tokens:
            raise ValueError(f"max_num_batched_tokens = {tokens} is not from {least} to {self._most_tokens}")
        if not config.enable_chunked_prefill and tokens < self._core.capacity.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens = {tokens} is less than max_model_len "
                f"({self._core.capacity.max_model_len}), and prompts are not computed in chunks"
            )
        self._scheduler.set_limits(seqs, tokens)
        after = self.get_limits()
        if after != before:
            logger.info("limits changed from %s to %s, asked by %s", before, after, self.caller)
        return after

    @utility
    def set_log_level(self, level: str, logger_name: str | None = None) -> None:
        """Of the engine and its ranks: all their loggers, or one of `logs.LOGGERS`."""
        logs.set_level(level, logger_name)
        self._core.executor.collective_rpc("set_log_level", args=(level, logger_name))
        logger.warning("log level %s, asked by %s", level.upper(), self.caller)

    # Requests, caches, workers.

    @utility
    def abort_requests(self, request_ids: list[str]) -> list[str]:
        """End requests; returns those that were live.

        The answer is sent after all outputs they had: no token of them follows it, and their blocks and slots
        are free.
        """
        return [request.request_id for request in self._core.abort_requests(request_ids)]

    @utility
    def reset_prefix_cache(self, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """False while requests hold blocks, unless they may be preempted. There is no connector."""
        logger.info("reset of the prefix cache, asked by %s", self.caller)
        return self._core.reset_prefix_cache(reset_running)

    @utility
    def reset_mm_cache(self) -> None:
        """There is no multi-modal input, hence no cache; vLLM's Python front end calls this at its start."""

    @utility
    def reset_encoder_cache(self) -> None:
        """As `reset_mm_cache`."""

    @utility
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every rank; the answers by rank. `timeout` in seconds."""
        logger.info("%s is called on every rank, asked by %s", method, self.caller)
        answers: list[Any] = self._core.executor.collective_rpc(method, timeout, args or (), kwargs)
        return answers

    @utility
    def barrier(self, name: str, timeout_s: float = 30.0) -> None:
        """Returns when every rank has done all that was sent to it before. Raises TimeoutError with the ranks
        that have not, and what they do instead.
        """
        try:
            self._core.executor.collective_rpc("barrier", timeout_s, args=(name,))
        except WorkerTimeout as error:
            raise TimeoutError(
                f"barrier {name!r}: not reached within {timeout_s:g} s by {self._whereabouts(error.ranks)}"
            ) from error

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        places = self._core.executor.whereabouts()
        return ", ".join(f"rank {rank} ({places.get(rank, 'nobody knows where')})" for rank in ranks)

    @utility
    def profile(
        self,
        is_start: bool = True,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start or stop the workers' profilers; `stop_profile` tells more."""
        if delay_iterations or max_iterations or profiler_kwargs:
            raise ValueError("the workers' profilers take a prefix and nothing else")
        logger.info("profile %s, asked by %s", "start" if is_start else "stop", self.caller)
        self._core.executor.collective_rpc("profile", args=(is_start, prefix))

    @utility
    def stop_profile(self) -> list[Any]:
        """Stop the workers' profilers; what each rank says, most likely the file that the profile is in."""
        answers: list[Any] = self._core.executor.collective_rpc("profile", args=(False,))
        return answers

    # Helpers

    def _after_idle(
        self, action: Callable[[], None], *, all_ended: bool = False, outlasts_resume: bool = False
    ) -> Deferred | None:
        """Run `action` once no step has anything to do; None if that was at once. See `_AwaitsIdle`."""
        if not self._core.has_work and not (all_ended and self._scheduler.requests):
            action()
            return None
        answer = Deferred()
        self._await_idle.append(_AwaitsIdle(answer, action, all_ended, outlasts_resume))
        return answer

    def _clear_caches(self) -> None:
        if not self._core.reset_prefix_cache(reset_running=True):
            raise RuntimeError("the prefix cache could not be reset: requests still hold blocks")

    def _show(self) -> None:
        """In the state page."""
        row = self._core.row
        if row is None:
            return
        row.pause = _PAGE_PAUSE[self._scheduler.pause_state]
        row.sleep_level = self._sleep_level
        row.weight_version = self.weights.version
        row.weight_status = self.weights.status
        row.kv_status = self._kv_status
        row.max_num_seqs = self._scheduler.max_running
        row.max_num_batched_tokens = self._scheduler.budget
        if row.phase in ("ready", "draining"):
            row.phase = "draining" if self._is_draining else "ready"
