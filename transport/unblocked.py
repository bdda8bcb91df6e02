"""Writing to a descriptor that others share, and that perhaps nobody reads.

Such a descriptor, a process's standard error for example, must not be put into non-blocking mode, which would
change it for the others too; so it is asked first.
"""

from __future__ import annotations

import os
import select


def write_some(fd: int, data: bytes, wait_s: float = 0.0) -> int:
    """Write as much of `data` as `fd` takes without waiting; returns how many bytes.

    `wait_s` is for the first of them. Raises OSError if `fd` cannot be written to.
    """
    view = memoryview(data)
    written = 0
    while written < len(view) and select.select([], [fd], [], 0.0 if written else wait_s)[1]:
        # A pipe that can be written to has room for this much.
        written += os.write(fd, view[written : written + select.PIPE_BUF])
    return written
