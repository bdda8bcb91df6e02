"""Hearing of what happens to a ZMQ socket's connections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

_numbers = itertools.count()


def monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that has a message for each of `events`. To be closed after `socket.disable_monitor()`.

    pyzmq would make its address from the socket's descriptor, whose number may be used again before ZMQ has
    let go of the address.
    """
    return socket.get_monitor_socket(events, f"inproc://monitor-{next(_numbers)}")


def events_of(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """The events that have happened, in order; does not wait."""
    while monitor.poll(0):
        yield recv_monitor_message(monitor)["event"]
