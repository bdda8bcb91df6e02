"""The rows of a batch that decodes: the same requests, one token each, step after step.

What the columns say of them is kept in row order here, so that such a step looks nothing up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor.step import Int32s, SchedulerOutput


class SteadyRows:
    """Made of the rows of a step that computes all their tokens; good for the steps that follow it.

    - `ends` int32 (n,): tokens known, all of which the step at hand computes
    - `limits` int32 (n,): tokens that the rows' blocks hold
    - `next_at` int64 (n,): where the token that the step at hand samples goes in the flat token ids
    - `samples` bool (n,): true
    """

    def __init__(self, slots: bytes, ends: Int32s, limits: Int32s, row_starts: npt.NDArray[np.int64]) -> None:
        self.ends = ends
        self.limits = limits
        self.next_at = row_starts + ends
        self.samples = np.ones(len(ends), np.bool_)
        self.samples.flags.writeable = False
        self._slots = slots
        self._ones = np.ones(len(ends), np.int32).tobytes()
        self._computed = b""  # by the step before
        self._longest = int(ends.max())

    def are_in(self, step: SchedulerOutput) -> bool:
        """Whether `step`, which comes next, has these rows, each with its next token, and no others."""
        return (
            step.num_computed_tokens.tobytes() == self._computed
            and step.slots.tobytes() == self._slots
            and step.num_scheduled_tokens.tobytes() == self._ones
        )

    def begin_step(self) -> bool:
        """False if a row has no block for its token."""
        self.ends += 1
        return not (self.ends > self.limits).any()

    def have_sampled(self, tokens: Int32s, counts: Int32s, max_model_len: int) -> bool:
        """Whether each row has one more token, and room for it."""
        return tokens.shape[1] == 1 and counts.tobytes() == self._ones and self._longest < max_model_len

    def advance(self) -> None:
        """The step at hand is done, and its tokens are known."""
        self.next_at += 1
        self._longest += 1
        self._computed = self.ends.tobytes()
