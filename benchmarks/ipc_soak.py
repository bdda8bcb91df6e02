"""Hours of traffic in minutes: random sizes, random pauses, every byte checked, and memory that stays flat.

    python -m benchmarks.ipc_soak [--seconds 600] [--readers 4] [--messages N] [--remote 1] [--seed S]

One writer and its readers, each a process. Prints a line every ten seconds and a summary; status 1 if a
message was torn, lost or out of order, or if any process grew. With --messages, ends after so many instead
of after a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import zlib
from typing import Any

import msgspec

from transport import Handle, MessageQueue, QueueClosed

SIZES = (0, 1, 20, 64, 300, 1000, 5000, 20_000, 60_000)
BLOB = random.Random(1).randbytes(1 << 20)
GROWTH_LIMIT_KIB = 4096
TIMEOUT_S = 60.0


def resident_kib() -> int:
    """Private memory; the ring's shared pages do not count."""
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") // 1024


def read(handle: str, rank: int, remote: bool) -> dict[str, Any]:
    """Read all messages; what was found."""
    queue = MessageQueue.attach(
        msgspec.msgpack.decode(bytes.fromhex(handle), type=Handle), rank, remote=remote, timeout_s=TIMEOUT_S
    )
    dice = random.Random(rank)
    count = wrong = settled = 0
    try:
        while True:
            with queue.dequeue(TIMEOUT_S) as message:
                view = message.view
                wrong += int.from_bytes(view[:8], "little") != count
                wrong += int.from_bytes(view[8:16], "little") != zlib.crc32(view[16:])
                del view
            count += 1
            if count == 10_000:
                settled = resident_kib()
            if dice.random() < 1e-3:
                time.sleep(dice.random() * 3e-3)
    except QueueClosed:
        pass
    stats = queue.stats
    queue.close()
    return {
        "rank": rank,
        "count": count,
        "wrong": wrong,
        "growth_kib": resident_kib() - settled if settled else 0,
        "parks": stats.parks,
        "longest_wait_s": round(stats.longest_wait_s, 4),
    }


def write(args: argparse.Namespace) -> int:
    local = args.readers - args.remote
    queue = MessageQueue.create(
        n_local=local,
        n_remote=args.remote,
        remote_host="127.0.0.1",
        capacity_bytes=1 << 18,
        name="soak",
    )
    handle = msgspec.msgpack.encode(queue.handle()).hex()
    readers = [
        subprocess.Popen(
            [sys.executable, __file__, "--reader", handle, str(rank), str(int(rank >= local))],
            stdout=subprocess.PIPE,
        )
        for rank in range(args.readers)
    ]
    try:
        return _traffic(args, queue, readers)
    finally:
        queue.close()
        for reader in readers:
            reader.kill()
            reader.wait()


def _traffic(args: argparse.Namespace, queue: MessageQueue, readers: list[subprocess.Popen[bytes]]) -> int:
    queue.wait_until_ready(TIMEOUT_S)
    dice = random.Random(args.seed)
    started = reported = time.monotonic()
    number = settled = 0
    while number < args.messages if args.messages else time.monotonic() - started < args.seconds:
        size = dice.choice(SIZES) if number % 1000 else 700_000
        start = number * 7919 % 4096
        body = BLOB[start : start + size]
        queue.enqueue(
            number.to_bytes(8, "little"), zlib.crc32(body).to_bytes(8, "little"), body, timeout_s=TIMEOUT_S
        )
        number += 1
        if number == 10_000:
            settled = resident_kib()
        if dice.random() < 1e-3:
            time.sleep(dice.random() * 3e-3)
        if not number & 1023 and time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(f"{reported - started:6.0f} s  {number} messages  {resident_kib()} KiB", flush=True)
    queue.close()
    seconds = time.monotonic() - started
    growth = resident_kib() - settled if settled else 0
    results = [json.loads(reader.communicate(timeout=TIMEOUT_S)[0]) for reader in readers]
    good = number > 0 and growth < GROWTH_LIMIT_KIB
    for result in results:
        print(json.dumps(result))
        good &= result["count"] == number and not result["wrong"] and result["growth_kib"] < GROWTH_LIMIT_KIB
    print(
        json.dumps(
            {
                "seed": args.seed,
                "messages": number,
                "deliveries": number * args.readers,
                "seconds": round(seconds, 1),
                "writer_growth_kib": growth,
                "good": good,
            }
        )
    )
    return int(not good)


def main() -> int:
    if sys.argv[1:2] == ["--reader"]:
        print(json.dumps(read(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--messages", type=int, default=0)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--remote", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    return write(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
