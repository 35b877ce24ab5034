"""A process that trains on a CPU keeps the memory that it frees, for the next step."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3) of the GNU C library.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 2**31 - 1  # bytes; what is free beyond goes back to the system
_MAPPED = 2**30  # bytes; a larger tensor gets memory of its own, which goes back when it is freed


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed. Returns whether it can: the GNU C library does, others are left alone.

    It otherwise gives memory back to the system at the end of a step, and each tensor above 32 MiB at once, and the
    system clears each page anew before it gives it out: in a step of a wide layer that takes longer than computing.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _MAPPED))
