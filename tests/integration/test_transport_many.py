"""Many queues at once, and any traffic that hypothesis thinks of, between real processes."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transport_peers import ROOT, peers, queue, send_all, start_readers


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n=st.integers(1, 8),
    capacity=st.sampled_from([4096, 1 << 14, 1 << 18]),
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 20_000)), min_size=1, max_size=500),
    pauses=st.tuples(*[st.sampled_from([0.0, 1e-4, 5e-3])] * 2),
    wait=st.sampled_from(["default", "few_cores", "lowest_latency"]),
)
def test_any_sizes_readers_and_pauses(
    n: int, capacity: int, sizes: list[int], pauses: tuple[float, float], wait: str
) -> None:
    with peers() as start, queue(n, capacity) as writer:
        readers = start_readers(start, writer, n, pause=pauses[0], wait=wait)
        send_all(writer, sizes, pause=pauses[1])
        writer.close()
        for reader in readers:
            result = reader.read()
            assert (result["count"], result["wrong"], result["error"]) == (len(sizes), 0, "QueueClosed")


def test_many_processes_make_many_queues_at_once() -> None:
    """8 processes, each 32 queues with a reader of its own, 20 rounds: no address, descriptor or segment is
    mixed up.
    """
    code = (
        "from transport import MessageQueue\n"
        "import os\n"
        "for round in range(20):\n"
        "    writers = [MessageQueue.create(n_local=1, capacity_bytes=4096) for _ in range(32)]\n"
        "    readers = [MessageQueue.attach(w.handle(), 0, timeout_s=20) for w in writers]\n"
        "    for k, w in enumerate(writers): w.enqueue(b'%d %d' % (os.getpid(), k), timeout_s=5)\n"
        "    for k, r in enumerate(readers): assert r.dequeue_copy(5) == b'%d %d' % (os.getpid(), k)\n"
        "    for q in writers + readers: q.close()\n"
        "assert len(os.listdir('/proc/self/fd')) < 20\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(8)]
    try:
        assert [process.wait(50) for process in running] == [0] * 8
    finally:
        for process in running:
            process.kill()
            process.wait()
