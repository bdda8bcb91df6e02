"""How an engine process is told to stop: by signals, and by deadlines for what does not end by itself."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger("engine_core")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_GRACE_S = 10.0  # for tearing down by force


class StopNow(BaseException):
    """Raised in the main thread, whatever it is doing: unwind and go. Not an `Exception`, so that no handler
    of errors takes it for one.
    """

    def __init__(self, reason: str, signum: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signum = signum


class StopSignals:
    """SIGTERM and SIGINT of this process, from `install` to `restore`. For the main thread.

    While the engine starts, the first one raises `StopNow`. Once it serves (`serve`), the first one asks the
    loop to stop, and the next one raises.
    """

    def __init__(self) -> None:
        self.signum: int | None = None  # the first that came
        self._wake: Callable[[], None] | None = None
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self._timer: threading.Timer | None = None
        self._told = threading.Event()  # a signal has come, or none is waited for any more
        self._forced = False

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def restore(self) -> None:
        self._told.set()
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def serve(self, wake: Callable[[], None], within_s: float) -> None:
        """From now on the first signal calls `wake`, from a signal handler. If the process runs on for longer
        than `within_s`, because the loop hangs in a step, it is stopped as by a second signal.
        """
        self._wake = wake
        threading.Thread(
            target=self._force_in_time, args=(within_s,), name="stop-deadline", daemon=True
        ).start()

    def _force_in_time(self, within_s: float) -> None:
        self._told.wait()  # no deadline: it is for the case that a signal comes
        if self.signum is not None:
            self.force_after(within_s)

    @property
    def serving(self) -> bool:
        return self._wake is not None

    def interrupt(self) -> None:
        """From any thread: end the start as a signal would."""
        self._forced = True
        self._signal_main_thread()

    def force_after(self, seconds: float) -> None:
        """If the process still runs by then, stop it as a second signal would; if that is in vain, exit."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, self._force)
            self._timer.daemon = True
            self._timer.start()

    def _force(self) -> None:
        logger.warning("the engine does not stop in time; it is forced to")
        self._forced = True
        self._timer = threading.Timer(LAST_GRACE_S, lambda: os._exit(self.exit_code(1)))
        self._timer.daemon = True
        self._timer.start()
        self._signal_main_thread()

    @staticmethod
    def _signal_main_thread() -> None:
        # The handler runs in the main thread, also while that waits for a lock.
        ident = threading.main_thread().ident
        if ident is not None:
            signal.pthread_kill(ident, signal.SIGTERM)

    def exit_code(self, otherwise: int) -> int:
        return otherwise if self.signum is None else 128 + self.signum

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._forced:
            raise StopNow("stopped by force", self.signum)
        first, self.signum = self.signum is None, self.signum or signum
        if first and self._wake is not None:
            self._told.set()
            self._wake()
        else:
            raise StopNow(f"stopped by {signal.Signals(signum).name}", self.signum)
