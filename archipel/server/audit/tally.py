"""What happens too often for an audit entry each: counted by minute, then written as one entry of each kind.

So whoever makes it happen cannot fill the log: a web process adds at most one entry of each kind in a minute, with the
sources that it counted most. Counts are in memory until the first request after the minute, or the end of the process;
a process that is killed loses those of its last minute.
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
"""How many sources an entry names. Who opened a session is in the request log."""
MOST_SOURCES = 1000
"""In one minute; further ones are counted together."""
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
        """`source` is such as "address:203.0.113.7" or "device:ID"; never what a token or a body holds."""
        with self._lock:
            if not self._counts:
                self._begun = now
            counts = self._counts.setdefault(kind, Counter())
            counts[source if source in counts or len(counts) < MOST_SOURCES else OTHERS] += 1

    def flush(self, database: Database, now: float, *, whole: bool = False) -> None:
        """Write what was counted if its minute is over, or else only if `whole`. A database that is not there keeps
        nobody from being served: it is tried again later."""
        with self._lock:
            over = int(now // MINUTE) > int(self._begun // MINUTE) and now >= self._not_before
            if not self._counts or not (over or whole):
                return
            counts, begun = self._counts, self._begun
            self._counts = {}
        minute = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(begun))
        try:
            with database.write() as session:
                for kind, found in sorted(counts.items()):
                    audit.append(session, now, "server", kind, minute, **_detail(found, NAMED[kind]))
        except SQLAlchemyError as error:
            log.warning("the audit log has to wait: %s", getattr(error, "orig", error))
            with self._lock:
                for kind, found in self._counts.items():
                    counts.setdefault(kind, Counter()).update(found)
                self._counts, self._begun, self._not_before = counts, begun, now + RETRY_SECONDS


def _detail(found: Counter[str], named: int) -> dict[str, int]:
    known = {source: times for source, times in found.items() if source != OTHERS}
    most = sorted(known, key=lambda source: (-known[source], source))[:named]
    return {"count": found.total(), "sources": len(known), **{source: known[source] for source in most}}
