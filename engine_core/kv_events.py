"""What happens to the prefix cache, told to routers: vLLM 0.33's KV events.

The block pool tells a `KVEventRecorder` which contents became reachable and which are gone; once a step the
recorder hands what has gathered to a publisher (`kv_publisher`). Without KV events there is no recorder, and
the pool does nothing for it.

One difference from vLLM: equal content computed twice occupies two blocks, and vLLM announces and removes it
twice, so that a consumer that keeps a set forgets content that is still there. Here it is announced when the
first block has it and removed when the last one is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from transport.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from engine_core.request import Request

MEDIUM = "GPU"  # vLLM's word for the device that the workers' cache is on
_SPEC_KIND = "full_attention"
_GROUP = 0  # all layers share one group of blocks


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of vLLM's `--kv-events-config`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: zmq if events are enabled
    endpoint: str = "tcp://*:5557"  # of the PUB socket; a wildcard or ipc address is bound, others connected
    replay_endpoint: str | None = None  # of the ROUTER socket that repeats batches
    buffer_steps: Annotated[int, Meta(ge=0)] = 10_000  # batches kept for it
    hwm: Annotated[int, Meta(ge=0)] = 100_000  # batches queued for a slow subscriber; 0: no limit
    max_queue_size: Annotated[int, Meta(ge=1)] = 100_000  # batches queued for the publisher's thread
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


BlockHash: TypeAlias = bytes | int  # vLLM sends integers if told so by an environment variable


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Contents that a prefix can hit from now on: consecutive blocks of one sequence."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # of the block before the first; None at the start of a sequence
    token_ids: list[int]  # of all the blocks
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # One entry per block, what its hash covers besides tokens: the adapter's name, and in the first the
    # cache salt.
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Contents that are gone."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All contents are gone."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step did to the cache."""

    ts: float  # Unix seconds
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class StoredBlocks(NamedTuple):
    """Blocks `first` to `last - 1` of a request have become reachable.

    Their hashes and tokens do not change any more, so that they may be read later, and by another thread.
    """

    request: Request
    first: int
    last: int


# What was stored, the hash of a content that is gone, or None for everything.
RawEvent: TypeAlias = "StoredBlocks | bytes | None"


class Publisher(Protocol):
    def publish(self, ts: float, events: list[RawEvent]) -> None:
        """Takes over a step's events; does not wait."""
        ...


class KVEventRecorder:
    """Gathers a step's events, as cheaply as it can: a step must not become longer for them."""

    __slots__ = ("_clock", "_events", "_publisher")

    def __init__(self, publisher: Publisher, clock: Clock = SYSTEM_CLOCK) -> None:
        self._publisher = publisher
        self._clock = clock
        self._events: list[RawEvent] = []

    def stored(self, request: Request, first: int, last: int) -> None:
        """The contents of the request's blocks `first` to `last - 1` are reachable, and were not before."""
        self._events.append(StoredBlocks(request, first, last))

    def removed(self, block_hash: bytes) -> None:
        """No block has this content any more."""
        self._events.append(block_hash)

    def cleared(self) -> None:
        """No block has any content any more."""
        self._events.append(None)

    def flush(self) -> None:
        """Hands over what has gathered. To be called once a step, and after a reset of the cache."""
        if self._events:
            events, self._events = self._events, []
            self._publisher.publish(self._clock.time(), events)


def token_bytes(request: Request, start: int, end: int) -> bytes:
    """Known tokens `start` to `end - 1` of a request, int32. They are filed with it, not in the batch."""
    prompt_end = request.num_prompt_tokens
    if end <= prompt_end:
        return request.prompt[start:end].tobytes()
    output = bytes(request.output[4 * max(0, start - prompt_end) : 4 * (end - prompt_end)])
    return output if start >= prompt_end else request.prompt[start:].tobytes() + output


def wire_events(raw: Iterable[RawEvent], block_size: int) -> Iterator[KVEvent]:
    """The events as they are published."""
    removed: list[BlockHash] = []
    for event in raw:
        if isinstance(event, bytes):
            removed.append(event)
            continue
        if removed:
            yield BlockRemoved(removed, MEDIUM, _GROUP)
            removed = []
        yield AllBlocksCleared() if event is None else _block_stored(event, block_size)
    if removed:
        yield BlockRemoved(removed, MEDIUM, _GROUP)


def _block_stored(event: StoredBlocks, block_size: int) -> BlockStored:
    request, first, last = event
    lora, hashes = request.lora, request.block_hashes
    every = (lora.name,) if lora is not None else ()
    start = (*every, request.cache_salt) if request.cache_salt and not first else every
    tokens = token_bytes(request, first * block_size, last * block_size)
    return BlockStored(
        block_hashes=list(hashes[first:last]),
        parent_block_hash=hashes[first - 1] if first else None,
        token_ids=np.frombuffer(tokens, np.int32).tolist(),
        block_size=block_size,
        lora_id=lora.int_id if lora is not None else None,
        medium=MEDIUM,
        lora_name=lora.name if lora is not None else None,
        extra_keys=[start or None, *[every or None] * (last - first - 1)],
        group_idx=_GROUP,
        kv_cache_spec_kind=_SPEC_KIND,
    )
