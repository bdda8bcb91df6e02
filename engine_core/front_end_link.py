"""The way to a vLLM front end, found again when the front end has gone and come back.

A front end says no goodbye; its death shows as the loss of a connection. Then its requests are at an end, and
whoever listens at its addresses from now on is told of the engine anew. A front end that hands out other
addresses at every start is, besides, asked for them in a handshake, for as long as it takes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from engine_core.errors import HandshakeError
from engine_core.handshake import FrontEnd, FrontEndDialog
from engine_core.protocol import EngineAddresses, ReadyResponse
from engine_core.sockets import (
    ClientSockets,
    Context,
    CoordinatorSockets,
    connect_front_end,
    connect_output,
    encode_registration,
)

logger = logging.getLogger("engine_core")

_RETRY_S = 1.0  # after a front end has answered nonsense
_SLICE_S = 0.25  # how soon a thread that waits notices that it is not needed any more


@dataclass(frozen=True, slots=True)
class FrontEndJoined:
    """A front end has come back, with new addresses."""

    clients: list[ClientSockets]  # to replace those that there are; empty: these will do
    coordinator: CoordinatorSockets | None


class FrontEndLink:
    """For the main thread. `register(addresses)` is what the engine says of itself; `on_joined` is called
    from a thread of the link's own.
    """

    def __init__(
        self,
        context: Context,
        front_end: FrontEnd,
        addresses: EngineAddresses,
        register: Callable[[EngineAddresses], ReadyResponse],
        on_joined: Callable[[FrontEndJoined], None],
    ) -> None:
        self._context = context
        self._front_end = front_end
        self._addresses = addresses
        self._register = register
        self._on_joined = on_joined
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self) -> list[ClientSockets]:
        """Raises HandshakeError."""
        return connect_front_end(
            self._context, self._addresses, self._front_end, self._register(self._addresses)
        )

    def renew_output(self, client: ClientSockets) -> None:
        """For whoever takes the place of a client that is gone: nothing of the old one's outputs."""
        client.replace_output(connect_output(self._context, self._addresses.outputs[client.client_index]))

    def introduce(self, client: ClientSockets) -> None:
        """Somebody has taken the place of a client that was gone: say what the engine is."""
        client.input.send(encode_registration(self._register(self._addresses)))

    def redial(self) -> None:
        """Ask for a handshake, if this front end is one for that and none is under way."""
        if self._front_end.handshake_address is None:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._shake_hands, name="front-end", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _shake_hands(self) -> None:
        while not self._closing.is_set():
            try:
                joined = self._try_to_join()
            except (HandshakeError, zmq.ZMQError) as error:
                logger.warning("the front end cannot be joined again: %s", error)
                self._closing.wait(_RETRY_S)
                continue
            if joined is not None:
                self._on_joined(joined)
                return

    def _try_to_join(self) -> FrontEndJoined | None:
        """One handshake; None if the link is closed meanwhile. Raises HandshakeError."""
        with FrontEndDialog(self._context, self._front_end) as dialog:
            init = dialog.join_whenever(self._closing, _SLICE_S)
            if init is None:
                return None
            addresses = init.addresses
            if addresses == self._addresses:  # the sockets that there are find it by themselves
                dialog.announce_ready()
                return FrontEndJoined([], None)
            if len(addresses.inputs) != len(self._addresses.inputs):
                raise HandshakeError(
                    f"it has {len(addresses.inputs)} API servers, it had {len(self._addresses.inputs)}"
                )
            clients = connect_front_end(self._context, addresses, self._front_end, self._register(addresses))
            coordinator = None
            if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
                coordinator = CoordinatorSockets(
                    self._context, addresses.coordinator_input, addresses.coordinator_output
                )
                while not coordinator.input.poll(int(_SLICE_S * 1000), zmq.POLLIN):
                    if self._closing.is_set():
                        return None
                coordinator.wait_until_ready(0.0)
            self._addresses = addresses
            dialog.announce_ready()
            return FrontEndJoined(clients, coordinator)
