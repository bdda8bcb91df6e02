"""The clients of an engine process: their messages in, their outputs out, and what becomes of both when one
of them comes, goes, or does not read.
"""

from __future__ import annotations

import logging
from collections import deque

import zmq

from engine_core.dispatch import Dispatcher
from engine_core.front_end_link import FrontEndLink
from engine_core.sockets import OUTPUT_LINGER_MS, ClientSockets, Socket
from engine_core.zmq_monitor import events_of
from transport.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger("engine_core")

MAX_MESSAGES_PER_TURN = 256  # of one client, before the next step
FLUSH_TIMEOUT_S = 2.0  # for the last outputs of clients that do not keep up


class Clients:
    """For the thread of the step loop, which waits with `poller` and hands over sockets that are ready."""

    def __init__(self, poller: zmq.Poller, dispatcher: Dispatcher, clock: Clock = SYSTEM_CLOCK) -> None:
        self._poller = poller
        self._dispatcher = dispatcher
        self._clock = clock
        self._by_index: dict[int, ClientSockets] = {}
        self._by_input: dict[Socket, ClientSockets] = {}
        self._by_monitor: dict[Socket, ClientSockets] = {}
        self._slow: dict[Socket, ClientSockets] = {}  # by output; those that do not keep up
        self._unread: deque[tuple[ClientSockets, list[bytes]]] = deque()
        self._front_end: FrontEndLink | None = None

    def set_front_end(self, front_end: FrontEndLink) -> None:
        """The clients that have a monitor are its."""
        self._front_end = front_end

    def add(self, client: ClientSockets) -> None:
        self._by_index[client.client_index] = client
        self._dispatcher.client_names[client.client_index] = client.name
        self._by_input[client.input] = client
        self._poller.register(client.input, zmq.POLLIN)
        if client.monitor is not None:
            self._by_monitor[client.monitor] = client
            self._poller.register(client.monitor, zmq.POLLIN)

    def remove(self, client_index: int) -> None:
        """A client has gone: its requests are aborted."""
        client = self._by_index[client_index]
        self._disconnect(client)
        aborted = self._dispatcher.abort_client(client_index)
        logger.info("%s left; %d of its requests were aborted", client.name, aborted)

    def announce_death(self) -> None:
        """The last message on every output after a crash."""
        for client in self._by_index.values():
            client.send_dead()

    def close(self) -> None:
        for client in self._by_index.values():
            client.close(0 if client.is_lost else OUTPUT_LINGER_MS)

    # Input

    def take(self, source: Socket) -> bool:
        """A socket is ready. False if it is no client's."""
        if source in self._by_input:
            self._read(self._by_input[source])
        elif source in self._slow:
            self._catch_up(self._slow[source])
        elif source in self._by_monitor:
            self._take_connection_events(self._by_monitor[source])
        else:
            return False
        return True

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def dispatch(self) -> None:
        """Give the messages that were taken in to the dispatcher."""
        unread, receive = self._unread, self._dispatcher.receive
        while unread:
            client, frames = unread.popleft()
            receive(client.client_index, client.group, frames)

    def aborted_ids(self) -> list[str]:
        """Ids to abort, from messages that are not dispatched yet."""
        aborted_ids = self._dispatcher.aborted_ids
        return [request_id for _, frames in self._unread for request_id in aborted_ids(frames)]

    def _read(self, client: ClientSockets) -> None:
        read = client.input.recv_multipart
        try:
            for _ in range(MAX_MESSAGES_PER_TURN):
                self._unread.append((client, read(zmq.NOBLOCK)))
        except zmq.Again:
            pass

    def _take_connection_events(self, client: ClientSockets) -> None:
        """Of the connection to an API server of the front end."""
        assert client.monitor is not None and self._front_end is not None
        for event in events_of(client.monitor):
            if event == zmq.EVENT_DISCONNECTED:
                self._lose(client, self._front_end)
            elif client.is_lost:
                client.is_lost = False
                self._front_end.introduce(client)
                logger.info("%s is there again", client.name)

    def _lose(self, client: ClientSockets, front_end: FrontEndLink) -> None:
        """The connection is lost: most likely the front end has died."""
        if client.is_lost:
            return
        client.is_lost = True
        self._drop_unread(client)
        front_end.renew_output(client)
        # If it is there still, it learns what became of its requests.
        aborted = self._dispatcher.tell_aborted(client.client_index)
        logger.warning("%s is gone; %d of its requests were aborted", client.name, aborted)
        front_end.redial()

    def _disconnect(self, client: ClientSockets) -> None:
        self._drop_unread(client)
        del self._by_index[client.client_index]
        del self._by_input[client.input]
        if client.input in self._poller:
            self._poller.unregister(client.input)
        if client.monitor is not None:
            del self._by_monitor[client.monitor]
            self._poller.unregister(client.monitor)
        client.close(linger_ms=0)

    def _drop_unread(self, client: ClientSockets) -> None:
        """What came from it, and what it did not read."""
        self._unread = deque(item for item in self._unread if item[0] is not client)
        if self._slow.pop(client.output, None) is not None:
            self._poller.unregister(client.output)
            if client.input not in self._poller:
                self._poller.register(client.input, zmq.POLLIN)

    # Output

    def send(self) -> None:
        """What the dispatcher has left to be sent."""
        outbox, clients = self._dispatcher.outbox, self._by_index
        for client_index, frames in outbox:
            client = clients.get(client_index)
            if client is not None:
                client.send(frames)
                if client.unsent and client.output not in self._slow:
                    self._slow_down(client)
        outbox.clear()
        for client in self._slow.values():
            if client.input in self._poller and self._dispatcher.is_full(client.client_index):
                self._poller.unregister(client.input)  # it hears no answer, so it is not heard

    def _slow_down(self, client: ClientSockets) -> None:
        """ZMQ takes no more for this client: merge what comes, and wait until it does."""
        self._slow[client.output] = client
        self._poller.register(client.output, zmq.POLLOUT)
        self._dispatcher.hold_back(client.client_index)
        logger.info("%s does not read its outputs; they are held back", client.name)

    def _catch_up(self, client: ClientSockets) -> None:
        """ZMQ takes something again."""
        client.send_unsent()
        if client.unsent:
            return
        for frames in self._dispatcher.release(client.client_index):
            client.send(frames)
        if client.unsent:
            self._dispatcher.hold_back(client.client_index)
            return
        del self._slow[client.output]
        self._poller.unregister(client.output)
        if client.input not in self._poller:
            self._poller.register(client.input, zmq.POLLIN)
        logger.info("%s reads its outputs again", client.name)

    def flush(self) -> None:
        """Give slow clients a last chance."""
        deadline = self._clock.monotonic() + FLUSH_TIMEOUT_S
        while self._slow:
            poller = zmq.Poller()
            for output in self._slow:
                poller.register(output, zmq.POLLOUT)
            ready = poller.poll(max(0, int((deadline - self._clock.monotonic()) * 1000)))
            if not ready:
                return
            for output, _ in ready:
                self._catch_up(self._slow[output])
