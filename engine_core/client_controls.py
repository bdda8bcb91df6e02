"""The engine's controls as methods of both kinds of client.

What they mean is told in `engine_core.control`. A blocking client's methods return the answer, the asyncio
client's return it when awaited; both raise `UtilityError` if the engine refuses or fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from engine_core.protocol import Array
from executor.step import LoRARequest

PauseMode = Literal["abort", "wait", "keep"]


class ClientControls(ABC):
    @abstractmethod
    def utility(self, method: str, *args: Any, timeout_s: float | None = None) -> Any: ...

    # Pausing and sleeping.

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Any:
        """None, when nothing runs any more: "abort" ends all requests, "wait" lets the running ones finish,
        "keep" freezes them. New ones are refused until `resume_generation`, or queued with "keep".
        """
        return self.utility("pause_generation", mode, clear_cache)

    def resume_generation(self) -> Any:
        return self.utility("resume_scheduler")

    def is_paused(self) -> Any:
        return self.utility("is_scheduler_paused")

    def drain(self) -> Any:
        """None, when all requests have ended; new ones are refused until `resume_generation`."""
        return self.utility("drain")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Any:
        """None, when the workers have put the weights aside (level 1) or dropped them (2), and dropped the KV
        cache; level 0 pauses only.
        """
        return self.utility("sleep", level, mode)

    def wake_up(self, tags: list[str] | None = None) -> Any:
        """Whether the engine is fully awake. `tags`: of "weights", "kv_cache", "scheduling"; None: all."""
        return self.utility("wake_up", tags)

    def is_sleeping(self) -> Any:
        return self.utility("is_sleeping")

    def release_kv_cache_memory(self) -> Any:
        """After a pause: None, when the workers have dropped the KV cache, until `wake_up(["kv_cache"])`."""
        return self.utility("release_kv_cache_memory")

    def reset_prefix_cache(self, reset_running: bool = False) -> Any:
        """Whether it was: requests that hold blocks prevent it, unless they may be preempted."""
        return self.utility("reset_prefix_cache", reset_running)

    # Weights and adapters.

    def update_weights(
        self,
        weight_version: str,
        *,
        path: str | None = None,
        tensors: Mapping[str, Array] | None = None,
        options: Mapping[str, Any] | None = None,
        mode: PauseMode = "keep",
    ) -> Any:
        """None, when every rank has the weights of this version and requests go on. `tensors` are arrays by
        name, which every rank gets whole.
        """
        return self.utility(
            "update_weights",
            weight_version,
            path,
            None if tensors is None else dict(tensors),
            None if options is None else dict(options),
            mode,
        )

    def restore_weights(self) -> Any:
        """None, when the ranks have been restarted with the last version that was complete."""
        return self.utility("restore_weights")

    def get_weight_version(self) -> Any:
        return self.utility("get_weight_version")

    def add_lora(self, lora: LoRARequest) -> Any:
        """False if the workers had it."""
        return self.utility("add_lora", lora)

    def remove_lora(self, lora_id: int) -> Any:
        """False if the workers did not have it."""
        return self.utility("remove_lora", lora_id)

    def pin_lora(self, lora_id: int) -> Any:
        return self.utility("pin_lora", lora_id)

    def list_loras(self) -> Any:
        """Ids."""
        return self.utility("list_loras")

    # Limits, and a look inside.

    def set_limits(
        self, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
    ) -> Any:
        """What holds then, by name; None leaves a limit as it is."""
        return self.utility("set_limits", max_num_seqs, max_num_batched_tokens)

    def set_log_level(self, level: str) -> Any:
        """Of the engine and its ranks."""
        return self.utility("set_log_level", level)

    def barrier(self, name: str, within_s: float = 30.0) -> Any:
        """None, when every rank has done all that was sent to it before; an error names those that miss."""
        return self.utility("barrier", name, within_s)

    def start_profile(self, prefix: str | None = None) -> Any:
        """On every rank."""
        return self.utility("profile", True, prefix)

    def stop_profile(self) -> Any:
        """By rank, the file that the profile is in."""
        return self.utility("stop_profile")
