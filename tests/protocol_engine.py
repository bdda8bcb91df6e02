"""An engine behind its boundary, without a socket or a process: frames in, checked frames out."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_core.client_session import Envelope
from engine_core.core import EngineCore
from engine_core.dispatch import Dispatcher
from engine_core.wire import WireDecoder
from executor.base import make_executor
from tests.engines import mock_config
from tests.fake_frontend import ADD, REQUEST_FIELDS, UTILITY, check_envelope, encode

decoder = WireDecoder(Envelope)


class Engine:
    """An engine driven by messages, step by step."""

    def __init__(self, **config: Any) -> None:
        made = mock_config(**config)
        self.core = EngineCore(made, make_executor(made.executor_config()))
        self.dispatcher = Dispatcher(self.core)

    def add(self, request_id: Any, tokens: Any, client: int = 0, **params: Any) -> None:
        fields: dict[str, Any] = dict.fromkeys(REQUEST_FIELDS[:9])
        fields |= {"request_id": request_id, "prompt_token_ids": tokens, "arrival_time": 1.0}
        fields["sampling_params"] = {"max_tokens": 4, **params}
        self.receive([ADD, encode(list(fields.values()))], client)

    def call(self, method: str, *args: Any, client: int = 0) -> None:
        self.receive([UTILITY, encode([0, 7, method, list(args)])], client)

    def receive(self, frames: list[bytes], client: int = 0, group: range | None = None) -> None:
        self.dispatcher.receive(client, group or range(client, client + 1), frames)

    def step(self) -> list[tuple[int, Envelope]]:
        self.dispatcher.step()
        assert self.core.scheduler.check() == []
        return self.sent()

    def sent(self) -> list[tuple[int, Envelope]]:
        messages = []
        for client, frames in self.dispatcher.outbox:
            check_envelope(msgspec.msgpack.decode(frames[0]))
            messages.append((client, decoder.decode(frames)))
        self.dispatcher.outbox.clear()
        return messages

    def run(self) -> dict[str, list[int]]:
        """Step until nothing is left to do; tokens by request."""
        tokens: dict[str, list[int]] = {}
        while self.core.has_work:
            for _, message in self.step():
                for output in message.outputs:
                    tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens
