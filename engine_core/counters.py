"""What the scheduler counts, from the start on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Plain integers that only grow; whoever wants a rate compares two looks. Tokens and requests unless
    said.
    """

    requests_admitted: int = 0  # accepted by `add_request`
    requests_finished: int = 0  # ended for any reason
    refused_by_requests: int = 0  # by --max-num-queued-reqs
    refused_by_tokens: int = 0  # by --max-num-queued-tokens
    prefix_requests: int = 0  # looked up in the prefix cache; not those that come back after a preemption
    prefix_queries: int = 0  # tokens of those
    prefix_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # of prompts whose first output is out
    cached_tokens: int = 0  # of those, taken from the prefix cache
    generation_tokens: int = 0
    preemptions: int = 0
