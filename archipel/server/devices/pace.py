"""Pace steering: when a device is told to come again, so that all of them together come at a rate the server can take.

Up to `check_ins_per_second * retry_after` devices every one comes every `retry_after` seconds. Above that each comes so
much less often that the rate stays, after a time drawn anew with every answer (the idea: section 2.3 of Bonawitz et al.
2019). The times are exponential, which remembers nothing: devices that came together, after an outage or at a full
hour, come one by one from then on. Times drawn evenly from an interval would bring them back in waves.
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
    """When one of `devices` that check in is to come again; `draw` is uniform in [0, 1).

    Never sooner than `shortest`. Above that exponential with mean devices / per_second, and at most six times that.
    """
    mean = min(devices / per_second, LONGEST)
    return shortest if mean <= shortest else min(max(shortest, -mean * math.log1p(-draw)), 6 * mean)


class Pace:
    """Retry times for one server. The number of active devices is counted at most every 10 s."""

    def __init__(self, database: Database, *, shortest: float, per_second: float) -> None:
        self._database = database
        self._shortest, self._per_second = shortest, per_second
        self._random = random.Random()
        self._lock = threading.Lock()
        self._devices, self._counted = 0, float("-inf")

    def retry_after(self, now: float) -> float:
        """Seconds until the device that checks in at `now` is to come again."""
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
        """Devices that came in the last hour or are still to come: an outage does not make them forgotten."""
        active = (CheckInRow.last_seen > now - ACTIVE_SECONDS) | (CheckInRow.due > now)
        with self._database.read() as session:
            return session.scalar(select(func.count()).select_from(CheckInRow).where(active)) or 0
