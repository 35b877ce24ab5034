"""Check-ins that are answered late: a device without a round is kept waiting until it is in one (long polling).

A held check-in keeps its thread, and nothing else: no connection of the database, and none of the places that bound how
many requests are worked on at once. So each web process has as many threads more as it holds check-ins, and a device
that finds all of them taken is answered at once, as one that does not ask to be held. One thread of the process looks
for all held devices together whether a round has taken them.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from sqlalchemy import bindparam, select
from sqlalchemy.exc import SQLAlchemyError

from archipel.server.database.engine import Database
from archipel.server.database.tables import CheckInRow

LOOK_SECONDS = 0.25
"""How often a process looks whether rounds have taken the devices that it holds."""

_TAKEN = select(CheckInRow.device_id).where(
    CheckInRow.device_id.in_(bindparam("devices", expanding=True)), CheckInRow.round_id.is_not(None)
)
_log = logging.getLogger(__name__)


class HeldCheckIns:
    """The held check-ins of one web process: at most `most`, and one of each device.

    `working` is how many requests may be worked on at the same time. Whoever serves a request holds one of `places`
    meanwhile; a held check-in gives it back until it goes on.
    """

    def __init__(self, database: Database, *, most: int, working: int) -> None:
        self.places = threading.Semaphore(working)
        self._database = database
        self._most = most
        self._lock = threading.Lock()
        self._held: dict[str, threading.Event] = {}
        self._watching = False
        self._closed = threading.Event()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, device_id: str, seconds: float) -> float:
        """Wait until a round has taken the device, at most so long. Returns how long that was: 0.0 without a place.

        The caller serves a request and has one of `places`. A new check-in of a device ends the one that is held.
        """
        mine = threading.Event()
        with self._lock:
            before = self._held.get(device_id)
            if self._closed.is_set() or (before is None and len(self._held) >= self._most):
                return 0.0
            if before is not None:
                before.set()
            self._held[device_id] = mine
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="held-check-ins", daemon=True).start()
        began = time.monotonic()
        self.places.release()
        try:
            mine.wait(seconds)
        finally:
            with self._lock:
                if self._held.get(device_id) is mine:
                    del self._held[device_id]
            self.places.acquire()
        return time.monotonic() - began

    def close(self) -> None:
        """Have all held check-ins answered now, and hold none any more."""
        self._closed.set()
        with self._lock:
            for each in self._held.values():
                each.set()

    def _watch(self) -> None:
        while True:
            self._closed.wait(LOOK_SECONDS)
            with self._lock:
                if not self._held or self._closed.is_set():
                    self._watching = False
                    return
                devices = list(self._held)
            try:
                taken = [row.device_id for row in self._database.look_all(_TAKEN, devices=devices)]
            except SQLAlchemyError as error:
                # The devices are answered when their time is over, and the next look may succeed.
                _log.warning("held check-ins: the database cannot be read (%s)", type(error).__name__)
                continue
            with self._lock:
                for device_id in taken:
                    with suppress(KeyError):
                        self._held[device_id].set()
