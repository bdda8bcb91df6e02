"""The lobby's messages and addresses, and the handshake's."""

from __future__ import annotations

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import HandshakeError, ProtocolError
from engine_core.handshake import FrontEnd, FrontEndDialog, hello, identity, read_init, ready
from engine_core.lobby_protocol import (
    MAX_MESSAGE_BYTES,
    Ended,
    Join,
    Joined,
    Launch,
    MessageReader,
    Stop,
    default_address,
    frame,
    stream_socket,
)

MESSAGES = [Join(input="a", output="b", name="c"), Joined(7), Launch(config=b"x"), Stop(), Ended("why", True)]
encode = msgspec.msgpack.encode


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.integers(1, 20))
def test_messages_survive_any_cutting_of_the_stream(messages: list[Join], size: int) -> None:
    data = b"".join(map(frame, messages))
    reader = MessageReader()
    received = [m for at in range(0, len(data), size) for m in reader.feed(data[at : at + size])]
    assert received == messages


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x05hello",
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x0c" + encode({"type": "none"}) + b"\xc0",
    ],
)
def test_rubbish_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        MessageReader().feed(data)


def test_addresses() -> None:
    assert default_address() != default_address()
    for address, target in (
        (default_address(), None),
        ("ipc://@x", "\0x"),
        ("ipc:///tmp/x", "/tmp/x"),
        ("tcp://127.0.0.1:80", ("127.0.0.1", 80)),
        ("tcp://[::1]:80", ("::1", 80)),
    ):
        stream, found = stream_socket(address)
        stream.close()
        assert target is None or found == target
    for address in ("", "ipc://", "tcp://x", "tcp://x:y", "tcp://:1", "tcp://x:99999", "inproc://x"):
        with pytest.raises(ValueError, match="address"):
            stream_socket(address)
    with pytest.raises(ValueError, match="TMPDIR"):
        stream_socket("ipc:///" + "x" * 108)


def test_handshake_messages() -> None:
    front_end = FrontEnd(handshake_address="tcp://x:1", engine_index=513, local=True, headless=False)
    assert identity(513) == b"\x01\x02"
    assert msgspec.msgpack.decode(hello(front_end)) == {"status": "HELLO", "local": True, "headless": False}
    assert msgspec.msgpack.decode(ready(FrontEnd(handshake_address="tcp://x:1"))) == {
        "status": "READY", "local": False, "headless": True
    }  # fmt: skip


def test_init_of_both_front_ends_is_read() -> None:
    addresses = {"inputs": ["a", "b"], "outputs": ["c", "d"]}
    init = read_init([encode({"addresses": addresses, "parallel_config": {}})])
    assert init.addresses.outputs == ["c", "d"] and init.addresses.coordinator_input is None
    addresses |= {"coordinator_input": "e", "coordinator_output": "f", "frontend_stats_publish_address": "g"}  # type: ignore[dict-item]
    init = read_init(
        [encode({"addresses": addresses, "parallel_config": {"data_parallel_size": 2}, "new": 1})]
    )
    assert init.addresses.coordinator_output == "f"


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"", b""], "one frame"),
        ([b"\xc1"], "not one"),
        ([encode({})], "addresses"),
        ([encode({"addresses": {"inputs": ["a"], "outputs": []}})], "in pairs"),
        (
            [encode({"addresses": {"inputs": ["a"], "outputs": ["b"], "coordinator_input": "c"}})],
            "coordinator",
        ),
    ],
)
def test_bad_init_is_a_handshake_error(frames: list[bytes], message: str) -> None:
    with pytest.raises(HandshakeError, match=message):
        read_init(frames)


def test_who_waits_for_a_front_end_says_so(caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with (
            FrontEndDialog(context, FrontEnd(handshake_address="ipc://@nobody-listens-here")) as dialog,
            pytest.raises(HandshakeError, match=r"@nobody-listens-here did not answer HELLO within 0\.25 s"),
        ):
            dialog.join(timeout_s=0.25, warn_after_s=0.1)
    finally:
        context.term()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "waiting for the front end at ipc://@nobody-listens-here" in caplog.text
