"""What crosses between the engine and its workers each step.

Both messages are columns: one numpy array per field, rows in scheduling order. A running request is known by
its *slot*, a row index below `max_num_seqs` that it keeps until it leaves the batch; its id travels once.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from executor.sampling_params import SamplingParams

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

EMPTY = np.empty(0, np.int32)
EMPTY.flags.writeable = False


class LoRARequest(msgspec.Struct, array_like=True):
    """An adapter to apply, in vLLM's positional layout."""

    name: str
    int_id: int
    path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class NewRequest(msgspec.Struct):
    """A request that enters the batch: for the first time, or again after a preemption or a restart.

    It is sent in full, so a worker needs no memory of what left the batch.
    """

    slot: int
    request_id: str
    token_ids: Int32s  # (known,) prompt, then the outputs so far
    num_prompt_tokens: int
    num_computed_tokens: int  # whose KV is already in the given blocks (prefix cache hit)
    block_ids: Int32s  # (blocks,) all its blocks, those for this step included
    params: SamplingParams
    lora: LoRARequest | None = None


class SchedulerOutput(msgspec.Struct):
    """One step for the workers. They apply it in this order: slots that left, new requests, new blocks, then
    run."""

    step_id: int
    slots: Int32s  # (n,) rows to run; new requests included
    num_scheduled_tokens: Int32s  # (n,) >= 1
    num_computed_tokens: Int32s  # (n,) before this step
    new_requests: list[NewRequest] = msgspec.field(default_factory=list)
    new_block_slots: Int32s = EMPTY  # (m,) slot and block id of blocks appended to rows already in the batch,
    new_block_ids: Int32s = EMPTY  # (m,) in order
    finished_slots: Int32s = EMPTY  # (f,) ended or aborted since the last step; announced once
    preempted_slots: Int32s = EMPTY  # (p,) thrown out by this step

    @property
    def total_num_scheduled_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class Logprobs(msgspec.Struct):
    """Log-probs of sampled tokens, for the rows that asked. One line per row and sampled token."""

    rows: Int32s  # (r,) index into SchedulerOutput.slots, ascending
    token_ids: (
        Int32s  # (r, 1 + k): the sampled token, then the k most likely in order; k = the largest asked for
    )
    logprobs: Float32s  # (r, 1 + k) natural log
    ranks: Int32s  # (r,) 1-based rank of the sampled token in the vocabulary


class PromptLogprobs(msgspec.Struct):
    """Log-probs of the prompt tokens that this step computed, for one row.

    A step that computes positions [a, b) of the prompt yields lines for the *prompt tokens* at positions
    a + 1 .. min(b, prompt length - 1): the distribution after position i judges token i + 1.
    """

    row: int
    token_ids: Int32s  # (p, 1 + k): the actual prompt token, then the k most likely
    logprobs: Float32s  # (p, 1 + k)
    ranks: Int32s  # (p,)


class ModelRunnerOutput(msgspec.Struct):
    """What a step sampled; rows as in `SchedulerOutput.slots`.

    A row samples when the step computes the last of its known tokens (`BatchState.samples`).
    """

    step_id: int
    sampled_token_ids: Int32s  # (n, 1) or (n, 1 + k) with draft tokens; undefined beyond num_sampled
    num_sampled: Int32s  # (n,) 0 for a prefill chunk that is not the last
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = msgspec.field(default_factory=list)
