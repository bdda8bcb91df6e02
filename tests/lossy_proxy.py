"""A bad line between a publisher of KV events and a subscriber."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import zmq


class LossyProxy:
    """Forwards batches but for the numbers in `lose`."""

    def __init__(self, stack: ExitStack, upstream: str, lose: set[int]) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(upstream)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._lose = lose
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        stack.callback(self._close)

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._sub.poll(20):
                frames = self._sub.recv_multipart()
                if int.from_bytes(frames[1], "big") not in self._lose:
                    self._pub.send_multipart(frames)

    def _close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)
