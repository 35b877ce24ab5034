"""Times in a form for people."""

from __future__ import annotations

import time


def moment(seconds: float | None) -> str:
    """Unix seconds as UTC to the second, "-" for None; the number where it is beyond the calendar."""
    if seconds is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # which one depends on the system
        return f"{seconds} (Unix seconds)"
