"""The message transports that `bench ipc` compares: ours, and what is installed of others.

Each is made before the readers are forked. Then the writer's process calls `writer()` and reader i's
process `reader(i)`; they get functions that send the payload once, and that wait for it, call `taken` with
the message in hand, and let it go.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from executor.sampling_params import SamplingParams
from executor.step import NewRequest, SchedulerOutput
from executor.step_codec import decode_step, encode_step
from transport import Handle, MessageQueue
from transport.codec import decode

Send = Callable[[], None]
Taken = Callable[[], None]
Receive = Callable[[Taken], None]

_TIMEOUT_S = 20.0


class Transport(Protocol):
    def __init__(self, n_readers: int, payload: Payload) -> None: ...

    def writer(self) -> Send: ...

    def reader(self, index: int) -> Receive: ...

    def close(self) -> None: ...


class Payload:
    """What is sent: `size` bytes, or a whole scheduler step ("decode" or "mixed").

    The step of 256 running requests, with 32 new ones of 512 prompt tokens in a mixed one. Others get it as
    the lists and the dict that vLLM's message holds.
    """

    def __init__(self, size: int = 0, step: str = "") -> None:
        self.size = size
        self.step = step
        self.data = bytes(size)

    @functools.cached_property
    def rows(self) -> dict[str, Any]:
        dice = random.Random(1)
        number = functools.partial(dice.randrange, 1 << 20)
        ids = [str(uuid.UUID(int=dice.getrandbits(128))) for _ in range(256)]
        return {
            "ids": ids,
            "computed": [number() % 8192 for _ in ids],
            "blocks": [[number()] if dice.random() < 1 / 16 else [] for _ in ids],
            "new": [
                (
                    str(uuid.UUID(int=dice.getrandbits(128))),
                    [number() for _ in range(512)],
                    [number() for _ in range(32)],
                )
                for _ in range(32 if self.step == "mixed" else 0)
            ],
        }

    @functools.cached_property
    def columns(self) -> SchedulerOutput:
        rows = self.rows
        starts = [slot for slot, blocks in enumerate(rows["blocks"]) if blocks]
        n = 256 + len(rows["new"])
        return SchedulerOutput(
            step_id=7,
            slots=np.arange(n, dtype=np.int32),
            num_scheduled_tokens=np.array([1] * 256 + [512] * (n - 256), np.int32),
            num_computed_tokens=np.array(rows["computed"] + [0] * (n - 256), np.int32),
            new_requests=[
                NewRequest(
                    256 + k,
                    name,
                    np.array(prompt, np.int32),
                    512,
                    0,
                    np.array(blocks, np.int32),
                    SamplingParams(),
                )
                for k, (name, prompt, blocks) in enumerate(rows["new"])
            ],
            new_block_slots=np.array(starts, np.int32),
            new_block_ids=np.array([rows["blocks"][slot][0] for slot in starts], np.int32),
        )

    @functools.cached_property
    def lists(self) -> tuple[Any, ...]:
        rows = self.rows
        return 7, dict.fromkeys(rows["ids"], 1), rows["ids"], rows["computed"], rows["blocks"], rows["new"]


class Ours:
    """`transport.MessageQueue` with its defaults; messages are read in place."""

    n_remote = 0

    def __init__(self, n_readers: int, payload: Payload) -> None:
        self._payload = payload
        remote_host = "127.0.0.1" if self.n_remote else None
        self._queue = MessageQueue.create(n_local=n_readers, remote_host=remote_host, name="bench")
        self._handle: Handle = self._queue.handle()

    def writer(self) -> Send:
        queue, payload = self._queue, self._payload
        queue.wait_until_ready(_TIMEOUT_S)
        if payload.step:
            step = payload.columns
            return lambda: queue.enqueue(*encode_step(1, step), timeout_s=_TIMEOUT_S)
        return lambda: queue.enqueue(payload.data, timeout_s=_TIMEOUT_S)

    def reader(self, index: int) -> Receive:
        queue = MessageQueue.attach(self._handle, index, timeout_s=_TIMEOUT_S)

        def receive(taken: Taken) -> None:
            message = queue.dequeue(_TIMEOUT_S)
            message.view[-1]
            taken()
            message.release()

        def receive_step(taken: Taken) -> None:
            message = queue.dequeue(_TIMEOUT_S)
            _, head, arrays = decode(message.view)
            decode_step(head, arrays)
            taken()
            message.release()

        return receive_step if self._payload.step else receive

    def close(self) -> None:
        self._queue.close()


class Vllm:
    """vLLM's `MessageQueue`, which pickles."""

    def __init__(self, n_readers: int, payload: Payload) -> None:
        module = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
        self._cls: Any = module.MessageQueue
        self._payload = payload
        self._queue = self._cls(n_readers, n_readers)
        self._handle = self._queue.export_handle()

    def writer(self) -> Send:
        self._queue.wait_until_ready()
        message = self._payload.lists if self._payload.step else self._payload.data
        return lambda: self._queue.enqueue(message)

    def reader(self, index: int) -> Receive:
        queue = self._cls.create_from_handle(self._handle, index)
        queue.wait_until_ready()

        def receive(taken: Taken) -> None:
            queue.dequeue(indefinite=True)
            taken()

        return receive

    def close(self) -> None:
        pass


class Iceoryx2:
    """iceoryx2's Python binding, publish-subscribe without loss; the reader looks and yields in turn."""

    def __init__(self, n_readers: int, payload: Payload) -> None:
        self._n_readers = n_readers
        self._data = pickle.dumps(payload.lists, 5) if payload.step else payload.data
        self._is_step = bool(payload.step)
        self._name = f"bench/{os.getpid()}"

    def _service(self) -> Any:
        iox: Any = importlib.import_module("iceoryx2")
        iox.set_log_level(iox.LogLevel.Error)
        self._node = (
            iox.NodeBuilder.new()
            .signal_handling_mode(iox.SignalHandlingMode.Disabled)
            .create(iox.ServiceType.Ipc)
        )
        return (
            self._node.service_builder(iox.ServiceName.new(self._name))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(16)
            .subscriber_max_borrowed_samples(2)
            .max_subscribers(8)
            .max_publishers(1)
            .history_size(0)
            .open_or_create()
        )

    def writer(self) -> Send:
        iox: Any = importlib.import_module("iceoryx2")
        service, data, size = self._service(), self._data, len(self._data)
        publisher = (
            service.publisher_builder()
            .initial_max_slice_len(size)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        deadline = time.monotonic() + _TIMEOUT_S
        while service.dynamic_config.number_of_subscribers < self._n_readers:
            if time.monotonic() > deadline:
                raise TimeoutError("iceoryx2's subscribers did not come")
            time.sleep(0.02)
        publisher.update_connections()
        self._keep = (service, publisher)

        def send() -> None:
            sample = publisher.loan_slice_uninit(size)
            ctypes.memmove(sample.payload_ptr, data, size)
            sample.assume_init().send()

        return send

    def reader(self, index: int) -> Receive:
        time.sleep(0.1 + 0.02 * index)
        service = self._service()
        subscriber = service.subscriber_builder().buffer_size(16).create()
        self._keep = (service, subscriber)
        at = (ctypes.c_ubyte * len(self._data)).from_address

        def receive(taken: Taken) -> None:
            looks = 0
            while (sample := subscriber.receive()) is None:
                looks += 1
                if looks > 50:
                    os.sched_yield()
            view = memoryview(at(sample.payload_ptr)).cast("B")
            if self._is_step:
                pickle.loads(view)
            else:
                view[-1]
            taken()

        return receive

    def close(self) -> None:
        pass


class ZmqPub:
    """pyzmq, XPUB to SUB over a unix socket."""

    def __init__(self, n_readers: int, payload: Payload) -> None:
        self._n_readers = n_readers
        self._payload = payload
        self._path = tempfile.mktemp(prefix="bench-zmq-")

    def writer(self) -> Send:
        import zmq

        self._context = zmq.Context()
        socket = self._context.socket(zmq.XPUB)
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._path}")
        for _ in range(self._n_readers):
            socket.recv()
        if self._payload.step:
            return lambda: socket.send(pickle.dumps(self._payload.lists, 5))
        return lambda: socket.send(self._payload.data)

    def reader(self, index: int) -> Receive:
        import zmq

        socket = zmq.Context().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 64)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"ipc://{self._path}")

        def receive(taken: Taken) -> None:
            data = socket.recv()
            if self._payload.step:
                pickle.loads(data)
            taken()

        return receive

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class Pipes:
    """`multiprocessing.Pipe`, one to each reader; messages are pickled."""

    def __init__(self, n_readers: int, payload: Payload) -> None:
        self._payload = payload
        self._pipes = [multiprocessing.Pipe(duplex=False) for _ in range(n_readers)]

    def writer(self) -> Send:
        message = self._payload.lists if self._payload.step else self._payload.data

        def send() -> None:
            for _, end in self._pipes:
                end.send(message)

        return send

    def reader(self, index: int) -> Receive:
        end = self._pipes[index][0]

        def receive(taken: Taken) -> None:
            end.recv()
            taken()

        return receive

    def close(self) -> None:
        for ends in self._pipes:
            for end in ends:
                end.close()


TRANSPORTS: dict[str, type[Transport]] = {
    "engine-core": Ours,
    "vllm": Vllm,
    "iceoryx2": Iceoryx2,
    "pyzmq": ZmqPub,
    "multiprocessing": Pipes,
}
_MODULES = {"vllm": "vllm", "iceoryx2": "iceoryx2", "pyzmq": "zmq"}


def installed_peers() -> list[str]:
    """Names of the transports other than ours that can be measured here."""
    return [
        name
        for name in TRANSPORTS
        if name != "engine-core" and importlib.util.find_spec(_MODULES.get(name, "os")) is not None
    ]
