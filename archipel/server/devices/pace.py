"""Pace steering: tells each device when to check in again, so that all together come at a rate the server can handle.

With up to `check_ins_per_second * retry_after` devices, each comes every `retry_after` seconds. With more, each comes
less often, so that the rate stays the same, after a time drawn anew with every answer (the idea: section 2.3 of
Bonawitz et al. 2019, "Towards federated learning at scale"). The times are exponential, hence memoryless: devices that
came together, after an outage or at a full hour, come one by one from then on. Times drawn uniformly from an interval
would bring them back in waves.

While rounds take place, every phase waits for the slowest device to ask again. So a small fleet asks up to ten times as
often as every `retry_after` seconds then, as long as all of it together asks no more than QUICK_PER_SECOND times a
second: 8 devices every 0.2 s, 50 every second, 100 and more as always. A fleet that has nothing to do asks as always,
too, which spares batteries.
"""

from __future__ import annotations

import math
import random
import threading

from sqlalchemy import func, select

from archipel.server.database.engine import Database
from archipel.server.database.tables import LIVE, CheckInRow, Participant, Round, Task

LONGEST = 6 * 3600.0
COUNT_SECONDS = 10.0
ACTIVE_SECONDS = 3600.0
QUICKEST = 0.2
"""Seconds: no server tells a device to come again sooner, unless `retry_after` is even less."""
QUICK_PER_SECOND = 50.0
"""How often in a second all devices together may ask while they are told to come sooner than usual."""
BUSY_SECONDS = 60.0
"""So long after a round of its population, or the making of a task, a small fleet asks more often."""
LOOK_SECONDS = 1.0
MAX_POPULATIONS = 10_000


def retry_seconds(devices: int, *, shortest: float, per_second: float, draw: float) -> float:
    """Seconds until one of `devices` devices is to check in again; `draw` is uniform in [0, 1).

    Never less than `shortest`. Otherwise exponential with mean devices / per_second, and at most six times the mean.
    """
    # -log(1 - u) of a uniform u is exponential with mean 1. The cap changes one value in 400, and bounds the wait.
    mean = min(devices / per_second, LONGEST)
    return shortest if mean <= shortest else min(max(shortest, -mean * math.log1p(-draw)), 6 * mean)


def quick_seconds(devices: int, usual: float, per_second: float) -> float:
    """Seconds until one of `devices` devices is to ask again while rounds take place; at most the `usual` ones.

    All together ask at most `per_second` times a second, and at most QUICK_PER_SECOND times, if they ask more often
    than usual.
    """
    return min(usual, max(QUICKEST, usual / 10, devices / min(QUICK_PER_SECOND, per_second)))


class Pace:
    """Retry times of one server process.

    The number of active devices is counted at most every COUNT_SECONDS, or LOOK_SECONDS after many quick answers:
    until then devices that have just come are not known, and must not be told in great number to come soon.
    """

    def __init__(self, database: Database, *, shortest: float, per_second: float) -> None:
        self._database = database
        self._shortest, self._per_second = shortest, per_second
        self._random = random.Random()
        self._lock = threading.Lock()
        self._devices, self._counted, self._quick = 0, float("-inf"), 0
        self._busy: dict[str, tuple[bool, float]] = {}

    def retry_after(self, now: float, population: str = "") -> float:
        """Seconds until the device that checks in at `now` (Unix seconds) is to come again."""
        devices = self._active(now)
        quick = self._soon(devices)
        if population and quick < self._shortest and self._is_busy(population, now):
            return quick
        return retry_seconds(devices, shortest=self._shortest, per_second=self._per_second, draw=self._random.random())

    def after_round(self, now: float) -> float:
        """Seconds until a device that is in a round is to check in, once it has no more part in it."""
        return self._soon(self._active(now))

    def in_round(self, now: float) -> float:
        """Seconds until a device in a round is to ask for its phase again."""
        # Half of what devices without a round are told: a secure round has many phases, and all devices wait for each.
        return self.after_round(now) / 2

    def _soon(self, devices: int) -> float:
        return quick_seconds(devices, self._shortest, self._per_second)

    def _active(self, now: float) -> int:
        # One thread counts, outside of the lock; the others use the number before.
        with self._lock:
            self._quick += 1
            quick = self._soon(self._devices) < self._shortest
            often = quick and self._quick > 2 * QUICK_PER_SECOND
            due = now - self._counted >= (LOOK_SECONDS if often else COUNT_SECONDS)
            if due:
                self._counted, self._quick = now, 0
        if due:
            self._devices = self._count(now)
        return self._devices

    def _is_busy(self, population: str, now: float) -> bool:
        """Whether a round of the population is under way, or one ended or a task was made just now."""
        with self._lock:
            busy, looked = self._busy.get(population, (False, float("-inf")))
            if now - looked < LOOK_SECONDS:
                return busy
            if len(self._busy) >= MAX_POPULATIONS:
                self._busy.clear()
            self._busy[population] = (busy, now)
        since = now - BUSY_SECONDS
        of_live = select(Round.round_id).join(Task).where(Task.population == population, Task.state.in_(LIVE))
        at_work = of_live.where(Round.ended.is_(None) & (Round.phase != "buffering") | (Round.ended > since))
        buffered = of_live.join(Participant, Participant.round_id == Round.round_id).where(
            Round.phase == "buffering", Participant.ends > now
        )
        new = select(Task.task_id).where(Task.population == population, Task.state == "running", Task.created > since)
        with self._database.read() as session:
            busy = any(session.scalar(query.limit(1)) is not None for query in (new, at_work, buffered))
        with self._lock:
            self._busy[population] = (busy, now)
        return busy

    def _count(self, now: float) -> int:
        """Devices that came in the last hour or are due later. During an outage none comes, but all will come again."""
        active = (CheckInRow.last_seen > now - ACTIVE_SECONDS) | (CheckInRow.due > now)
        with self._database.read() as session:
            return session.scalar(select(func.count()).select_from(CheckInRow).where(active)) or 0
