"""Reader and writer processes for the transport's tests, and messages that prove themselves.

A peer is started with a JSON object as its only argument and answers with one JSON object per line on stdout.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from transport import Handle, MessageQueue, TransportError, WaitPolicy

ROOT = Path(__file__).parent.parent
_BLOB = random.Random(7).randbytes(1 << 20)
_POLICIES = {
    "default": WaitPolicy(),
    "few_cores": WaitPolicy.few_cores(),
    "lowest_latency": WaitPolicy.lowest_latency(),
}


# Messages


def message(number: int, size: int) -> tuple[bytes, bytes]:
    """Two parts: number and checksum, then `size` bytes."""
    start = number * 7919 % 4096
    body = (_BLOB[start:] * (1 + size // (1 << 19)))[:size]
    return number.to_bytes(8, "little") + zlib.crc32(body).to_bytes(8, "little"), body


def is_right(view: memoryview | bytes, number: int) -> bool:
    """Whether this is, byte for byte, the message of that number."""
    return (
        int.from_bytes(view[:8], "little") == number
        and int.from_bytes(view[8:16], "little") == zlib.crc32(view[16:])
        and len(view) >= 16
    )


# Starting peers


class Peer:
    """A process of this module."""

    def __init__(self, prefix: Sequence[str] = (), **arguments: Any) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.transport_peers", json.dumps(arguments)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"peer {self.pid} said nothing for {timeout_s} s"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"peer {self.pid} ended with {self.process.wait()}"
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def packed(handle: Handle) -> str:
    return msgspec.msgpack.encode(handle).hex()


def unpacked(text: str) -> Handle:
    return msgspec.msgpack.decode(bytes.fromhex(text), type=Handle)


@contextmanager
def peers() -> Iterator[Any]:
    """A function that starts peers, all of which are gone afterwards."""
    started: list[Peer] = []

    def start(role: str, prefix: Sequence[str] = (), **arguments: Any) -> Peer:
        peer = Peer(prefix, role=role, **arguments)
        started.append(peer)
        return peer

    try:
        yield start
    finally:
        for peer in started:
            peer.end()


def queue(n: int, capacity: int = 1 << 16, **kwargs: Any) -> MessageQueue:
    """The writer's end in this process."""
    return MessageQueue.create(n_local=n, capacity_bytes=capacity, name="test", **kwargs)


def start_readers(start: Any, writer: MessageQueue, n: int, **arguments: Any) -> list[Peer]:
    """Reader processes of ranks 0 to n - 1, attached."""
    readers = [start("reader", handle=packed(writer.handle()), rank=rank, **arguments) for rank in range(n)]
    writer.wait_until_ready(20)
    for reader in readers:
        assert reader.read()["attached"]
    return readers


def send_all(writer: MessageQueue, sizes: list[int], pause: float = 0.0) -> None:
    """One message of each size, with a pause of up to `pause` seconds after every twentieth."""
    dice = random.Random(len(sizes))
    for number, size in enumerate(sizes):
        writer.enqueue(*message(number, size), timeout_s=20)
        if pause and dice.random() < 0.05:
            time.sleep(dice.random() * pause)


# What peers do


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def kill_at(line_event: int, file_name: str) -> None:
    """Kill this process at the given line executed in a file from now on."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(file_name):
            return None
        if event == "line":
            count += 1
            if count > line_event:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def reader(
    handle: str,
    rank: int,
    wait: str = "default",
    pause: float = 0.0,
    raise_at: int = -1,
    expect: int = -1,
    kill_at_message: int = -1,
    kill_at_line: int = -1,
    timeout: float = 20.0,
    threads: int = 0,
    fork: bool = False,
    delay: float = 0.0,
    remote: bool = False,
) -> None:
    """Read and check messages until the queue ends or `expect` have come; then say how it went."""
    time.sleep(delay)
    queue = MessageQueue.attach(
        unpacked(handle), rank, remote=remote, timeout_s=timeout, wait=_POLICIES[wait]
    )
    child = 0
    if fork:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
    for _ in range(threads):
        threading.Thread(target=_burn, daemon=True).start()
    say(attached=True, pid=os.getpid(), child=child)
    dice = random.Random(rank)
    count = wrong = nbytes = 0
    error = text = ""
    started = time.monotonic()
    while count != expect:
        if count == kill_at_message:
            kill_at(kill_at_line, "ring.py")
        try:
            with queue.dequeue(timeout) as received:
                wrong += not is_right(received.view, count)
                nbytes += len(received.view)
                count += 1
                if pause and dice.random() < 0.05:
                    time.sleep(dice.random() * pause)
                if count == raise_at:
                    raise LookupError
        except LookupError:
            say(raised=count)
        except TransportError as failure:
            error, text = type(failure).__name__, str(failure)
            break
    ended = time.monotonic()
    stats = queue.stats
    say(
        count=count,
        wrong=wrong,
        nbytes=nbytes,
        error=error,
        text=text,
        at=ended,
        seconds=ended - started,
        parks=stats.parks,
        longest_wait_s=stats.longest_wait_s,
        cpu_s=time.process_time(),
    )
    queue.close()


def writer(
    n_local: int,
    messages: int,
    sizes: list[int],
    capacity: int = 1 << 16,
    wait: str = "default",
    pause: float = 0.0,
    kill_at_message: int = -1,
    kill_at_line: int = -1,
    suppress_wakes: bool = False,
    linger: float = 600.0,
    close: bool = True,
    seed: int = 0,
    fork: bool = False,
    timeout: float = 20.0,
    n_remote: int = 0,
    remote_host: str | None = None,
    gap: float = 0.0,
) -> None:
    """Send messages of random sizes out of `sizes`; then close the queue, or just stay."""
    queue = MessageQueue.create(
        n_local=n_local,
        n_remote=n_remote,
        remote_host=remote_host,
        capacity_bytes=capacity,
        wait=_POLICIES[wait],
    )
    say(handle=packed(queue.handle()), pid=os.getpid())
    queue.wait_until_ready(timeout)
    child = 0
    if fork:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
    say(ready=True, child=child)
    if suppress_wakes:
        os.eventfd_write = lambda fd, value: None
    dice = random.Random(seed)
    for number in range(messages):
        parts = message(number, dice.choice(sizes))
        if number == kill_at_message:
            kill_at(kill_at_line, "ring.py")
        try:
            queue.enqueue(*parts, timeout_s=timeout)
        except TransportError as failure:
            say(sent=number, error=type(failure).__name__, text=str(failure))
            break
        if gap:
            time.sleep(gap)
        if pause and dice.random() < 0.05:
            time.sleep(dice.random() * pause)
    else:
        say(sent=messages, error="")
    if close:
        queue.close()
    say(closed=close)
    time.sleep(linger)


def _burn() -> None:
    while True:
        sum(range(1000))


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    {"reader": reader, "writer": writer}[arguments.pop("role")](**arguments)
