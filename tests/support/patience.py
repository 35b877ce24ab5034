"""How long tests wait for other processes before they say that something hangs."""

from __future__ import annotations

import os


def stretched(seconds: float) -> float:
    """These seconds of an idle machine, times the processes that want each of its cores.

    For limits that only end what hangs: a server whose processes are killed computes for seconds until it answers
    again, and gets a fraction of a core while other tests run.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
