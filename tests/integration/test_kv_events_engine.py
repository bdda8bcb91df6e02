"""A router's copy of the prefix-cache index, kept from a live engine's events."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine_core.client import EngineClient
from engine_core.kv_events import KVEventsConfig
from engine_core.kv_index import Gap, Item, KVCacheIndex, KVEventSubscriber
from executor.sampling_params import SamplingParams
from tests.engines import VOCAB, mock_config
from tests.lossy_proxy import LossyProxy
from tests.vllm_rs import free_port


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Router:
    """An engine, traffic with shared prefixes that does not fit its cache, and a copy of the index."""

    def __init__(self, stack: ExitStack, lose: set[int], buffer_steps: int = 10_000) -> None:
        events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        config = mock_config(
            num_blocks=120,
            max_num_seqs=4,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                endpoint=events.replace("127.0.0.1", "*"),
                replay_endpoint=replay.replace("127.0.0.1", "*"),
                buffer_steps=buffer_steps,
            ),
        )
        self.engine = stack.enter_context(EngineClient.launch(config))
        proxy = LossyProxy(stack, events, lose)
        self.subscriber = KVEventSubscriber(proxy.endpoint, replay)
        stack.callback(self.subscriber.close)
        self.index = KVCacheIndex()
        self._random = random.Random(1)
        self._stems = [[self._random.randrange(VOCAB) for _ in range(200)] for _ in range(4)]

    def serve(self, count: int) -> None:
        rng = self._random
        for _ in range(count):
            prompt = rng.choice(self._stems)[: rng.randrange(200)] + [rng.randrange(VOCAB) for _ in range(40)]
            self.engine.add_request(prompt, SamplingParams(max_tokens=rng.randrange(1, 60)))
        while self.engine.num_live:
            self.engine.outputs(10.0)

    def follow(self) -> list[Item]:
        """Until the index is the engine's, which is idle."""
        wanted = set(self.engine.utility("get_kv_cache_hashes"))
        items: list[Item] = []
        deadline = time.monotonic() + 15
        while self.index.hashes != wanted:
            assert time.monotonic() < deadline, (len(self.index.hashes), len(wanted), len(items))
            for item in self.subscriber.poll(0.05):
                self.index.apply(item)
                items.append(item)
        return items

    def connect(self) -> None:
        """Until the subscription is there: a publisher drops what nobody has subscribed to."""
        items: list[Item] = []
        while not items:
            self.serve(1)
            items += self.subscriber.poll(0.05)
        for item in items:
            self.index.apply(item)


def test_the_copy_equals_the_engines_index_also_after_gaps_and_replay(stack: ExitStack) -> None:
    chance = random.Random(3)
    lost = {number for number in range(20, 10_000) if chance.random() < 0.3}
    router = Router(stack, lost)
    router.connect()
    router.serve(40)
    lost.clear()
    router.serve(1)  # a batch that comes through tells of any gap before it
    items = router.follow()
    assert router.index.complete and not any(isinstance(item, Gap) for item in items)
    assert router.engine.reset_prefix_cache() is True
    router.serve(3)
    router.follow()
    info = router.engine.info.kv_events_config
    assert info is not None and info["enable_kv_cache_events"] is True


def test_after_a_gap_that_cannot_be_filled_the_copy_claims_nothing_that_is_gone(stack: ExitStack) -> None:
    lost: set[int] = set()
    router = Router(stack, lost, buffer_steps=2)
    router.connect()
    lost |= set(range(10_000))
    router.serve(20)
    lost.clear()
    router.serve(2)
    deadline = time.monotonic() + 15
    while router.index.complete and time.monotonic() < deadline:
        for item in router.subscriber.poll(0.05):
            router.index.apply(item)
    for item in router.subscriber.poll(0.3):
        router.index.apply(item)
    assert not router.index.complete
    assert router.index.hashes <= set(router.engine.utility("get_kv_cache_hashes"))
    router.engine.reset_prefix_cache()
    router.serve(2)
    router.follow()
    assert router.index.complete
