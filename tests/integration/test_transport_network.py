"""Remote readers on a network of their own: two namespaces joined by a cable that can be slow, bad or cut."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.transport_peers import Peer, peers


class Network:
    """Namespaces a (10.99.0.1) and b (10.99.0.2)."""

    def __init__(self) -> None:
        self.a, self.b = (f"ec-{os.getpid()}-{side}" for side in "ab")
        for name in (self.a, self.b):
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            "cable",
            "netns",
            self.a,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            self.b,
        )
        for name, address in ((self.a, "10.99.0.1/24"), (self.b, "10.99.0.2/24")):
            run("ip", "-n", name, "addr", "add", address, "dev", "cable")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "cable", "up")

    def cut(self) -> None:
        run("ip", "-n", self.b, "link", "set", "cable", "down")

    def heal(self) -> None:
        run("ip", "-n", self.b, "link", "set", "cable", "up")

    def close(self) -> None:
        for name in (self.a, self.b):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"no network namespaces here: {reason}")
    yield made
    made.close()


def pair(start: object, network: Network, **arguments: object) -> tuple[Peer, Peer]:
    """A writer in a, its reader in b."""
    writer: Peer = start(  # type: ignore[operator]
        "writer",
        ["ip", "netns", "exec", network.a],
        n_local=0,
        n_remote=1,
        remote_host="10.99.0.1",
        **{"sizes": [10, 1000, 30_000], "timeout": 30.0, **arguments},
    )
    handle = writer.read()["handle"]
    reader: Peer = start(  # type: ignore[operator]
        "reader", ["ip", "netns", "exec", network.b], handle=handle, rank=0, remote=True, timeout=30.0
    )
    assert reader.read()["attached"]
    assert writer.read()["ready"]
    return writer, reader


def test_two_hosts(network: Network) -> None:
    with peers() as start:
        writer, reader = pair(start, network, messages=2000)
        result = reader.read()
        assert (result["count"], result["wrong"], result["error"]) == (2000, 0, "QueueClosed")
        assert writer.read() == {"sent": 2000, "error": ""}


def test_a_slow_and_lossy_line_loses_nothing(network: Network) -> None:
    try:
        for side in (network.a, network.b):
            run(
                "ip",
                "netns",
                "exec",
                side,
                "tc",
                "qdisc",
                "add",
                "dev",
                "cable",
                "root",
                "netem",
                "delay",
                "5ms",
                "loss",
                "2%",
            )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no tc netem here: {error.stderr.strip()}")
    with peers() as start:
        _, reader = pair(start, network, messages=300)
        result = reader.read(40)
        assert (result["count"], result["wrong"], result["error"]) == (300, 0, "QueueClosed")


def test_a_short_cut_heals_without_a_loss(network: Network) -> None:
    with peers() as start:
        _, reader = pair(start, network, messages=400, gap=0.005)
        time.sleep(0.5)
        network.cut()
        time.sleep(1.5)
        network.heal()
        result = reader.read(40)
        assert (result["count"], result["wrong"], result["error"]) == (400, 0, "QueueClosed")


def test_a_long_cut_is_told_by_name_on_both_sides(network: Network) -> None:
    with peers() as start:
        writer, reader = pair(start, network, messages=10**6, gap=0.01)
        time.sleep(0.3)
        network.cut()
        seen = writer.read(30)
        assert seen["error"] == "ReaderDied"
        assert f"rank 0 (pid {reader.pid}" in seen["text"]
        result = reader.read(30)
        assert (result["wrong"], result["error"]) == (0, "WriterDied")
        assert result["count"] <= seen["sent"]
