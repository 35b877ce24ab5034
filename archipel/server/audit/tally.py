"""Counts events that are too frequent for one audit entry each, and writes one entry for each kind and minute.

So nobody can fill the log by causing such events: a web process adds at most one entry of each kind in a minute, with
the most frequent sources. Counts are in memory until the first request after the minute, or the end of the process; a
process that is killed loses those of its last minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Literal

from sqlalchemy.exc import SQLAlchemyError

from archipel.server.audit import log as audit
from archipel.server.database.engine import Database

log = logging.getLogger("archipel.server")

Kind = Literal["access.refused", "limit.hit", "session.open"]
NAMED: dict[Kind, int] = {"access.refused": 10, "limit.hit": 10, "session.open": 0}
"""How many sources an entry names. Devices that opened a session are in the request log."""
MOST_SOURCES = 1000
"""How many sources are counted separately in one minute. The others are counted together."""
OTHERS = "others"
MINUTE = 60
RETRY_SECONDS = 5.0


class Tally:
    """Counts of one web process. Times are Unix seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Kind, Counter[str]] = {}
        self._begun = 0.0
        self._not_before = 0.0

    def count(self, kind: Kind, source: str, now: float) -> None:
        """Count one event. `source` is like "address:203.0.113.7" or "device:ID", and never part of a token or body."""
        with self._lock:
            if not self._counts:
                self._begun = now
            counts = self._counts.setdefault(kind, Counter())
            # Bounded, because somebody may come from ever new addresses.
            counts[source if source in counts or len(counts) < MOST_SOURCES else OTHERS] += 1

    def flush(self, database: Database, now: float, *, whole: bool = False) -> None:
        """Write the counts if their minute is over, or in any case with `whole`.

        If the database cannot be used the counts are kept and written later, so no request fails because of them.
        """
        with self._lock:
            over = int(now // MINUTE) > int(self._begun // MINUTE) and now >= self._not_before
            if not self._counts or not (over or whole):
                return
            counts, begun = self._counts, self._begun
            self._counts = {}
        # Written without the lock, so that requests are counted meanwhile.
        minute = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(begun))
        try:
            with database.write() as session:
                for kind, sources in sorted(counts.items()):
                    audit.append(session, now, "server", kind, minute, **_detail(sources, NAMED[kind]))
        except SQLAlchemyError as error:
            log.warning("the audit log has to wait: %s", getattr(error, "orig", error))
            with self._lock:
                # Other threads may have counted meanwhile.
                for kind, sources in self._counts.items():
                    counts.setdefault(kind, Counter()).update(sources)
                self._counts, self._begun, self._not_before = counts, begun, now + RETRY_SECONDS


def _detail(sources: Counter[str], named: int) -> dict[str, int]:
    known = {source: times for source, times in sources.items() if source != OTHERS}
    most = sorted(known, key=lambda source: (-known[source], source))[:named]
    return {"count": sources.total(), "sources": len(known), **{source: known[source] for source in most}}
