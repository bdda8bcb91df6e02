"""KV events: what is recorded, what goes over the wire, and a router's copy of the index that is built from
it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
import zmq

from engine_core import kv_publisher
from engine_core.config import ConfigError
from engine_core.kv_encoding import BatchEncoder
from engine_core.kv_events import (
    KVEventBatch,
    KVEventRecorder,
    KVEventsConfig,
    RawEvent,
    StoredBlocks,
    wire_events,
)
from engine_core.kv_index import Gap, Item, KVCacheIndex, KVEventSubscriber, Restart
from engine_core.kv_publisher import END_OF_REPLAY, ZmqEventPublisher
from engine_core.request import Request
from executor.sampling_params import SamplingParams
from executor.step import LoRARequest
from tests.engines import wait_until
from tests.lossy_proxy import LossyProxy

BLOCK_SIZE = 4


class FixedClock:
    def monotonic(self) -> float:
        return 1.0

    def time(self) -> float:
        return 1700000000.5


class Keeper:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, list[RawEvent]]] = []

    def publish(self, ts: float, events: list[RawEvent]) -> None:
        self.batches.append((ts, events))


def request(prompt: int, output: int, **kwargs: object) -> Request:
    """Tokens 0, 1, 2, ...; block hashes b"0", b"1", ..."""
    request = Request("r", np.arange(prompt, dtype=np.int32), SamplingParams(), **kwargs)  # type: ignore[arg-type]
    request.output += np.arange(prompt, prompt + output, dtype=np.int32).tobytes()
    request.block_hashes = [str(i).encode() for i in range((prompt + output) // BLOCK_SIZE)]
    return request


def published(*calls: Callable[[KVEventRecorder], None]) -> list[object]:
    """The events as a consumer without our types decodes them."""
    keeper = Keeper()
    recorder = KVEventRecorder(keeper, FixedClock())
    for call in calls:
        call(recorder)
    recorder.flush()
    ((ts, raw),) = keeper.batches
    batch = msgspec.msgpack.decode(BatchEncoder(BLOCK_SIZE, 0).encode(ts, raw))
    assert (batch[0], batch[2]) == (1700000000.5, 0)
    return batch[1]  # type: ignore[no-any-return]


def test_stored_blocks_have_vllms_layout() -> None:
    assert published(lambda recorder: recorder.stored(request(11, 0), 0, 2)) == [
        {
            "type": "BlockStored",
            "block_hashes": [b"0", b"1"],
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


@pytest.mark.parametrize(
    ("prompt", "output", "first", "last"),
    [(8, 4, 1, 2), (8, 4, 2, 3), (6, 6, 1, 3), (6, 6, 1, 2), (2, 10, 0, 3)],
)
def test_token_ids_are_those_of_the_blocks_in_prompt_and_output(
    prompt: int, output: int, first: int, last: int
) -> None:
    (event,) = published(lambda recorder: recorder.stored(request(prompt, output), first, last))
    assert isinstance(event, dict)
    assert event["token_ids"] == list(range(4 * first, 4 * last))
    assert event["parent_block_hash"] == (str(first - 1).encode() if first else None)


@pytest.mark.parametrize("width", [16, 32])
def test_events_made_from_a_template_are_those_made_one_by_one(width: int) -> None:
    rng = random.Random(width)
    adapter = LoRARequest("poet", 3, "/adapters/poet")
    encoder = BatchEncoder(BLOCK_SIZE, 7)
    for _ in range(200):
        raw: list[RawEvent] = []
        for _ in range(rng.randrange(12)):
            kind = rng.random()
            if kind < 0.15:
                raw.append(rng.choice([None, rng.randbytes(width)]))
                continue
            one = request(rng.randrange(20), rng.randrange(20), lora=adapter if kind > 0.85 else None)
            one.prompt = np.array([rng.choice([0, 1, 200, 2**31 - 1]) for _ in one.prompt], np.int32)
            one.block_hashes = [rng.randbytes(width) for _ in one.block_hashes]
            if one.block_hashes:
                first = rng.randrange(len(one.block_hashes))
                last = rng.randint(first + 1, len(one.block_hashes)) if kind < 0.4 else first + 1
                raw.append(StoredBlocks(one, first, last))
        batch = msgspec.msgpack.decode(encoder.encode(2.5, raw), type=KVEventBatch)
        assert batch == KVEventBatch(2.5, list(wire_events(raw, BLOCK_SIZE)), 7)


def test_extra_keys_name_the_adapter_in_every_block_and_the_salt_in_the_first() -> None:
    adapter = LoRARequest("poet", 3, "/adapters/poet")
    salted = request(12, 0, cache_salt="s", lora=adapter)
    start, rest = published(
        lambda recorder: recorder.stored(salted, 0, 2), lambda recorder: recorder.stored(salted, 2, 3)
    )
    assert isinstance(start, dict)
    assert isinstance(rest, dict)
    assert (start["lora_id"], start["lora_name"]) == (3, "poet")
    assert start["extra_keys"] == [["poet", "s"], ["poet"]]
    assert rest["extra_keys"] == [["poet"]]
    (plain,) = published(lambda recorder: recorder.stored(request(8, 0, cache_salt="s"), 0, 2))
    assert isinstance(plain, dict)
    assert plain["extra_keys"] == [["s"], None]


def test_events_keep_their_order_and_neighbouring_removals_share_one() -> None:
    events = published(
        lambda recorder: recorder.removed(b"a"),
        lambda recorder: recorder.removed(b"b"),
        lambda recorder: recorder.cleared(),
        lambda recorder: recorder.removed(b"c"),
    )
    assert events == [
        {"type": "BlockRemoved", "block_hashes": [b"a", b"b"], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
        {"type": "BlockRemoved", "block_hashes": [b"c"], "medium": "GPU", "group_idx": 0},
    ]


def test_a_step_without_events_publishes_nothing() -> None:
    keeper = Keeper()
    KVEventRecorder(keeper).flush()
    assert keeper.batches == []


def test_config_has_vllms_keys_and_defaults() -> None:
    config = msgspec.json.decode(b'{"enable_kv_cache_events": true, "topic": "kv"}', type=KVEventsConfig)
    assert msgspec.to_builtins(config) == {
        "enable_kv_cache_events": True,
        "publisher": None,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "kv",
    }
    assert config.publishes
    assert not KVEventsConfig().publishes
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").publishes
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode(b'{"colour": 1}', type=KVEventsConfig)


# With sockets


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_publisher(stack: ExitStack, **kwargs: object) -> ZmqEventPublisher:
    settings = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"} | kwargs
    publisher = ZmqEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **settings), BLOCK_SIZE)  # type: ignore[arg-type]
    stack.callback(publisher.close)
    return publisher


def subscribe(
    stack: ExitStack, publisher: ZmqEventPublisher, endpoint: str | None = None
) -> KVEventSubscriber:
    subscriber = KVEventSubscriber(endpoint or publisher.endpoint, publisher.replay_endpoint)
    stack.callback(subscriber.close)
    return subscriber


class Engine:
    """A prefix cache that changes at random and publishes what it does, a batch a step."""

    def __init__(self, publisher: ZmqEventPublisher, seed: int) -> None:
        self.hashes: set[bytes] = set()
        self._recorder = KVEventRecorder(publisher)
        self._random = random.Random(seed)
        self._next = 0

    def step(self, clear: bool = False) -> None:
        if clear:
            self.hashes.clear()
            self._recorder.cleared()
        stored = request(16, 0)
        stored.block_hashes = [(self._next + i).to_bytes(32, "big") for i in range(4)]
        self._next += 4
        self.hashes.update(stored.block_hashes)
        self._recorder.stored(stored, 0, 4)
        count = min(self._random.randrange(6), len(self.hashes))
        for block_hash in self._random.sample(sorted(self.hashes), count):
            self.hashes.discard(block_hash)
            self._recorder.removed(block_hash)
        self._recorder.flush()


def follow(subscriber: KVEventSubscriber, index: KVCacheIndex, until: Callable[[], bool]) -> list[Item]:
    items: list[Item] = []
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline, f"no end in sight after {len(items)} batches"
        for item in subscriber.poll(0.05):
            index.apply(item)
            items.append(item)
    return items


def settle(engine: Engine, subscriber: KVEventSubscriber, index: KVCacheIndex) -> None:
    """Steps until the subscription is known to be in place: PUB drops what nobody has subscribed to yet."""
    seen: list[Item] = []

    def step_until_seen() -> bool:
        engine.step()
        return bool(seen)

    deadline = time.monotonic() + 20
    while not step_until_seen():
        assert time.monotonic() < deadline
        seen += list(subscriber.poll(0.05))
    for item in seen:
        index.apply(item)


def test_a_late_subscribers_index_equals_the_engines(stack: ExitStack) -> None:
    publisher = start_publisher(stack)
    engine, index = Engine(publisher, seed=1), KVCacheIndex()
    for number in range(300):
        engine.step(clear=number % 70 == 69)
    subscriber = subscribe(stack, publisher)
    settle(engine, subscriber, index)
    for _ in range(100):
        engine.step()
    follow(subscriber, index, lambda: index.hashes == engine.hashes)
    assert index.complete


def test_the_index_equals_the_engines_after_gaps_and_replay(stack: ExitStack) -> None:
    publisher = start_publisher(stack)
    chance = random.Random(2)
    lost = {number for number in range(20, 10_000) if chance.random() < 0.2}
    proxy = LossyProxy(stack, publisher.endpoint, lost)
    engine, index = Engine(publisher, seed=2), KVCacheIndex()
    subscriber = subscribe(stack, publisher, proxy.endpoint)
    settle(engine, subscriber, index)
    for _ in range(400):
        engine.step()
    lost.clear()
    engine.step()  # a batch that comes through tells of any gap before it
    items = follow(subscriber, index, lambda: index.hashes == engine.hashes)
    assert index.complete
    assert not any(isinstance(item, Gap) for item in items)


def test_after_a_gap_that_cannot_be_replayed_the_index_claims_nothing_that_is_gone(stack: ExitStack) -> None:
    publisher = start_publisher(stack, buffer_steps=3)
    lost: set[int] = set()
    proxy = LossyProxy(stack, publisher.endpoint, lost)
    engine, index = Engine(publisher, seed=3), KVCacheIndex()
    subscriber = subscribe(stack, publisher, proxy.endpoint)
    settle(engine, subscriber, index)
    follow(subscriber, index, lambda: index.hashes <= engine.hashes)
    lost |= set(range(10_000))
    for _ in range(20):
        engine.step()
    time.sleep(0.2)
    lost.clear()
    engine.step()
    items = follow(subscriber, index, lambda: bool(index.hashes) and not index.complete)
    assert any(isinstance(item, Gap) for item in items)
    assert index.hashes < engine.hashes
    engine.step(clear=True)
    follow(subscriber, index, lambda: index.complete and index.hashes == engine.hashes)


@pytest.mark.parametrize("published_before", [0, 5, 500])
def test_a_new_engine_at_the_address_starts_the_index_over(stack: ExitStack, published_before: int) -> None:
    """Whether its numbers are below, at or above those of the engine before."""
    with ExitStack() as first:
        publisher = start_publisher(first)
        endpoint, replay = publisher.endpoint, publisher.replay_endpoint
        engine, index = Engine(publisher, seed=4), KVCacheIndex()
        subscriber = subscribe(stack, publisher)
        settle(engine, subscriber, index)
        for _ in range(5):
            engine.step()
        follow(subscriber, index, lambda: index.hashes == engine.hashes)
    publisher = start_publisher(stack, endpoint=endpoint.replace("127.0.0.1", "*"), replay_endpoint=replay)
    engine = Engine(publisher, seed=5)
    for _ in range(published_before):
        engine.step()
    assert engine.hashes != index.hashes
    items: list[Item] = []
    deadline = time.monotonic() + 20
    while not items:
        assert time.monotonic() < deadline
        engine.step()
        items += subscriber.poll(0.05)
    assert [type(item) for item in items].count(Restart) == 1
    for item in items:
        index.apply(item)
    follow(subscriber, index, lambda: index.hashes == engine.hashes)
    assert index.complete


def test_catch_up_asks_for_what_was_published_before(stack: ExitStack) -> None:
    publisher = start_publisher(stack)
    engine, index = Engine(publisher, seed=6), KVCacheIndex()
    for _ in range(10):
        engine.step()
    subscriber = subscribe(stack, publisher)
    deadline = time.monotonic() + 10
    while index.hashes != engine.hashes and time.monotonic() < deadline:  # the thread may be a moment behind
        for item in subscriber.catch_up():
            index.apply(item)
    assert index.hashes == engine.hashes


def test_a_full_queue_drops_its_oldest_batches_and_never_waits(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    encode = BatchEncoder.encode

    def slow(self: BatchEncoder, ts: float, raw: list[RawEvent]) -> bytes:
        assert go_on.wait(20)
        return encode(self, ts, raw)

    monkeypatch.setattr(BatchEncoder, "encode", slow)
    publisher = start_publisher(stack, max_queue_size=5)
    for number in range(50):
        publisher.publish(float(number), [None])
    go_on.set()
    assert publisher.num_dropped >= 44  # one is in the thread's hands or none, five are queued
    subscriber = subscribe(stack, publisher)
    numbers: list[float] = []
    deadline = time.monotonic() + 10
    while 49.0 not in numbers and time.monotonic() < deadline:
        numbers += [item.ts for item in subscriber.catch_up() if isinstance(item, KVEventBatch)]
    assert numbers[-5:] == [45.0, 46.0, 47.0, 48.0, 49.0]
    assert len(numbers) == 50 - publisher.num_dropped


def test_closing_publishes_what_is_queued(stack: ExitStack) -> None:
    publisher = start_publisher(stack, topic="kv@host")
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"kv@")
    sub.connect(publisher.endpoint)
    deadline = time.monotonic() + 10
    while not sub.poll(20) and time.monotonic() < deadline:
        publisher.publish(0.0, [None])
    for _ in range(100):
        publisher.publish(2.0, [b"x"])
    publisher.publish(3.0, [None])
    publisher.close()
    frames: list[bytes] = []
    while sub.poll(2000):
        frames = sub.recv_multipart()
        if msgspec.msgpack.decode(frames[2])[0] == 3.0:
            break
    assert frames[0] == b"kv@host"
    assert msgspec.msgpack.decode(frames[2]) == [3.0, [{"type": "AllBlocksCleared"}], 0]


def test_without_replay_a_late_index_is_known_to_be_incomplete(stack: ExitStack) -> None:
    publisher = start_publisher(stack, replay_endpoint=None)
    engine, index = Engine(publisher, seed=7), KVCacheIndex()
    for _ in range(10):
        engine.step()
    wait_until(lambda: len(publisher._kept) >= 2, "a first batch that is gone for good")
    subscriber = subscribe(stack, publisher)
    assert list(subscriber.catch_up()) == []
    settle(engine, subscriber, index)
    assert not index.complete
    engine.step(clear=True)
    follow(subscriber, index, lambda: index.complete and index.hashes == engine.hashes)


def test_a_senseless_replay_request_is_ignored(stack: ExitStack) -> None:
    publisher = start_publisher(stack)
    publisher.publish(1.0, [None])
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    client = context.socket(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    client.connect(publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""]):
        client.send_multipart(frames)
    client.send_multipart([b"", (2**64 - 1).to_bytes(8, "big")])
    assert client.poll(10_000)
    assert client.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]


def test_an_address_that_cannot_be_used_is_named(stack: ExitStack) -> None:
    taken = start_publisher(stack)
    assert taken.replay_endpoint is not None
    for key, address in [("endpoint", "carrier://pigeon"), ("replay_endpoint", taken.replay_endpoint)]:
        with pytest.raises(ConfigError, match=f"kv_events_config.{key} = '{address}': cannot be opened"):
            start_publisher(stack, **{key: address})


def test_each_data_parallel_rank_has_ports_of_its_own() -> None:
    assert kv_publisher._offset("tcp://*:5557", 0) == "tcp://*:5557"
    assert kv_publisher._offset("tcp://*:5557", 3) == "tcp://*:5560"
    assert kv_publisher._offset("tcp://127.0.0.1:*", 3) == "tcp://127.0.0.1:*"
    assert kv_publisher._offset("inproc://cache", 3) == "inproc://cache_dp3"
