"""Times as people read them."""

from __future__ import annotations

import time


def moment(seconds: float | None) -> str:
    """Unix seconds as UTC to the second, "-" for None; a number where others sent what is beyond the calendar."""
    if seconds is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # no system has dates without end
        return f"{seconds} (Unix seconds)"
