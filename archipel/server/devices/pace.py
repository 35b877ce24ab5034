"""Pace steering: tells each device when to check in again, so that all together come at a rate the server can handle.

With up to `check_ins_per_second * retry_after` devices, each comes every `retry_after` seconds. With more, each comes
less often, so that the rate stays the same, after a time drawn anew with every answer (the idea: section 2.3 of
Bonawitz et al. 2019, "Towards federated learning at scale"). The times are exponential, hence memoryless: devices that
came together, after an outage or at a full hour, come one by one from then on. Times drawn uniformly from an interval
would bring them back in waves.
"""

from __future__ import annotations

import math
import random
import threading

from sqlalchemy import func, select

from archipel.server.database.engine import Database
from archipel.server.database.tables import CheckInRow

LONGEST = 6 * 3600.0
COUNT_SECONDS = 10.0
ACTIVE_SECONDS = 3600.0


def retry_seconds(devices: int, *, shortest: float, per_second: float, draw: float) -> float:
    """Seconds until one of `devices` devices is to check in again; `draw` is uniform in [0, 1).

    Never less than `shortest`. Otherwise exponential with mean devices / per_second, and at most six times the mean.
    """
    # -log(1 - u) of a uniform u is exponential with mean 1. The cap changes one value in 400, and bounds the wait.
    mean = min(devices / per_second, LONGEST)
    return shortest if mean <= shortest else min(max(shortest, -mean * math.log1p(-draw)), 6 * mean)


class Pace:
    """Retry times of one server process. The number of active devices is counted at most every COUNT_SECONDS."""

    def __init__(self, database: Database, *, shortest: float, per_second: float) -> None:
        self._database = database
        self._shortest, self._per_second = shortest, per_second
        self._random = random.Random()
        self._lock = threading.Lock()
        self._devices, self._counted = 0, float("-inf")

    def retry_after(self, now: float) -> float:
        """Seconds until the device that checks in at `now` (Unix seconds) is to come again."""
        # One thread counts, outside of the lock; the others use the number before.
        with self._lock:
            due = now - self._counted >= COUNT_SECONDS
            if due:
                self._counted = now
        if due:
            self._devices = self._count(now)
        return retry_seconds(
            self._devices, shortest=self._shortest, per_second=self._per_second, draw=self._random.random()
        )

    def _count(self, now: float) -> int:
        """Devices that came in the last hour or are due later. During an outage none comes, but all will come again."""
        active = (CheckInRow.last_seen > now - ACTIVE_SECONDS) | (CheckInRow.due > now)
        with self._database.read() as session:
            return session.scalar(select(func.count()).select_from(CheckInRow).where(active)) or 0
