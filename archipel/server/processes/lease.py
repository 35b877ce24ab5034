"""The lease that makes one of many coordinators the one: in the database, for some seconds, under a growing number.

Whoever holds it renews it; when it has expired another takes it, under the next number. Every transaction of a
coordinator checks the number of its own lease in that transaction (fencing), so one that was stopped or cut off for a
while, and does not know yet that it was replaced, cannot commit anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from archipel.errors import LeaseLostError
from archipel.server.database.engine import Database
from archipel.server.database.tables import LeaseRow

NAME = "coordinator"


class Lease:
    """`holder` (32 hexadecimal digits) is the data folder's: a process that is started again in the place of one that
    died takes up its lease at once. `term` is the number while this process holds the lease, else None."""

    def __init__(self, database: Database, holder: str, *, clock: Callable[[], float], seconds: float) -> None:
        self.holder, self.seconds = holder, seconds
        self.term: int | None = None
        self._database, self._clock = database, clock
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the lease if it is free, or renew it. Returns whether this process holds it now."""
        return self._hold(self._take)

    def renew(self) -> bool:
        """Renew the lease; one that was lost is not taken again, not even if it is free: what was begun under its
        number must not go on under another."""
        return self._hold(self._extend)

    def _hold(self, way: Callable[[Session], int | None]) -> bool:
        with self._lock:
            try:
                with self._database.write() as session:
                    term = way(session)
            except IntegrityError:  # another took the very first one at the same moment
                term = None
            self.term = term
            return term is not None

    def _take(self, session: Session) -> int | None:
        now = self._now(session)
        row = session.get(LeaseRow, NAME, with_for_update=True)
        if row is None:
            row = LeaseRow(name=NAME, holder=self.holder, term=1, expires=0.0)
            session.add(row)
        elif row.holder != self.holder and row.expires > now:
            return None
        elif not self._mine(row):
            row.holder, row.term = self.holder, row.term + 1
        row.expires = now + self.seconds
        return row.term

    def _extend(self, session: Session) -> int | None:
        row = session.get(LeaseRow, NAME, with_for_update=True)
        if row is None or not self._mine(row):
            return None
        row.expires = self._now(session) + self.seconds
        return row.term

    def _mine(self, row: LeaseRow) -> bool:
        return (row.holder, row.term) == (self.holder, self.term)

    def give_back(self) -> None:
        """So that another need not wait. Nothing happens where it was lost."""
        with self._lock, self._database.write() as session:
            row = session.get(LeaseRow, NAME, with_for_update=True)
            if row is not None and self._mine(row):
                row.expires = 0.0
            self.term = None

    def fence(self, session: Session) -> None:
        """Raises LeaseLostError unless the lease is still this process's, and keeps it so until `session` commits."""
        # Shared: on PostgreSQL a taker waits for the transactions of the one before, and sees what they did.
        term = session.scalar(select(LeaseRow.term).where(LeaseRow.name == NAME).with_for_update(read=True))
        if self.term is None or term != self.term:
            raise LeaseLostError(f"the lease is lost: its number is {term}, this coordinator's was {self.term}")

    def _now(self, session: Session) -> float:
        # The clocks of many machines differ; that of the database they share.
        if session.get_bind().dialect.name == "postgresql":
            return float(session.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
        return self._clock()
