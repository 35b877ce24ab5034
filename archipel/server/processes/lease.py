"""The lease in the database by which exactly one of several coordinators works.

A lease lasts some seconds and has a number, its term. Its holder renews it; when it has expired another coordinator
takes it, with the next term. Every transaction of a coordinator checks in that transaction that its term is still the
current one (fencing). So a coordinator that was stopped or cut off for a while, and does not know yet that it was
replaced, cannot commit anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from archipel.errors import LeaseLostError
from archipel.server.database.engine import Database, read_clock
from archipel.server.database.server_tables import COORDINATOR, LeaseRow

NAME = COORDINATOR


class Lease:
    """`holder` (32 hexadecimal digits) belongs to the data folder, so a process that is restarted there need not wait
    for the lease of the one that died. `term` is the lease's number while this process holds it, else None."""

    def __init__(self, database: Database, holder: str, *, clock: Callable[[], float], seconds: float) -> None:
        self.holder, self.seconds = holder, seconds
        self.term: int | None = None
        self._database, self._clock = database, clock
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the lease if it is free, or renew it. Returns whether this process holds it now."""
        return self._hold(self._take)

    def renew(self) -> bool:
        """Renew the lease. Returns whether this process still holds it.

        A lost lease is not taken again, even if it is free: work that was begun under one term must not be committed
        under another.
        """
        return self._hold(self._extend)

    def _hold(self, change: Callable[[Session], int | None]) -> bool:
        with self._lock:
            try:
                with self._database.write() as session:
                    term = change(session)
            except IntegrityError:  # another coordinator inserted the row at the same moment
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
            # A new term even for the same holder: if its former process still runs, that cannot commit any more.
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
        """Let the lease expire now, so that another coordinator need not wait. Does nothing if it was lost."""
        with self._lock, self._database.write() as session:
            row = session.get(LeaseRow, NAME, with_for_update=True)
            if row is not None and self._mine(row):
                row.expires = 0.0
            self.term = None

    def fence(self, session: Session) -> None:
        """Raise LeaseLostError unless this process holds the lease; else nobody can take it until `session` commits."""
        # A shared lock of the row: on PostgreSQL a coordinator that takes the lease waits for the open transactions of
        # the one before, and sees their results. SQLite has one writer at a time anyway.
        term = session.scalar(select(LeaseRow.term).where(LeaseRow.name == NAME).with_for_update(read=True))
        if self.term is None or term != self.term:
            raise LeaseLostError(f"the lease is lost: its number is {term}, this coordinator's was {self.term}")

    def _now(self, session: Session) -> float:
        # Coordinators on several machines must agree on the time.
        return read_clock(session, self._clock)
