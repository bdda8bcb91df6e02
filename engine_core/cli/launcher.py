"""For an engine that somebody else started and that is to end with it."""

from __future__ import annotations

import os
import select
import signal
import threading


def stop_with(parent: int) -> None:
    """From now on, this process gets SIGTERM when process `parent`, which started it, ends.

    The kernel's own way (PR_SET_PDEATHSIG) follows the thread that started us, which may end much earlier.
    """
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        pidfd = None
    if pidfd is None or os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    threading.Thread(target=_wait, args=(pidfd,), name="launcher", daemon=True).start()


def _wait(pidfd: int) -> None:
    select.select([pidfd], [], [])  # no deadline: it may live as long as it likes
    os.kill(os.getpid(), signal.SIGTERM)
