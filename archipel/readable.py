"""Waits until a pipe or socket can be read."""

from __future__ import annotations

import select


def wait_readable(descriptor: int, seconds: float) -> bool:
    """Wait at most `seconds` until there is something to read from the file descriptor, or its other end is closed.

    Returns whether there is.
    """
    # Not select.select, which refuses descriptors from 1,024 on, as a process with many connections has them.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
