"""How much an example store keeps, and for how long. All functions run inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from archipel.errors import StoreError
from archipel.lite_runtime.store.layout import Layout
from archipel.lite_runtime.store.records import sealed_bytes

MAX_ID = 1 << 62


class Quotas(NamedTuple):
    """Limits of a store: `max_bytes` of all sealed examples together, `max_age` in seconds (None: any age)."""

    max_bytes: int
    max_age: float | None

    def is_due(self, database: sqlite3.Connection, now: int) -> bool:
        """Whether some example is too old at `now`, in seconds since 1970."""
        if self.max_age is None:
            return False
        # None without examples; a hostile file may hold a time that is not an integer.
        oldest = database.execute("SELECT min(time) FROM examples").fetchone()[0]
        return isinstance(oldest, int) and oldest < now - self.max_age

    def trim(self, database: sqlite3.Connection, now: int, layout: Layout | None, room: int = 0) -> int:
        """Remove examples that are too old, then the oldest until `room` more fit. Returns how many went."""
        removed = 0
        if self.max_age is not None:
            removed = database.execute("DELETE FROM examples WHERE time < ?", (now - self.max_age,)).rowcount
        if layout is not None:
            # The stored count still includes those just removed; the UPDATE below corrects it.
            over = count_examples(database) - removed + room - self.max_bytes // sealed_bytes(layout)
            if over > 0:
                # By id, not by time: a clock that was set back must not make the newest examples go.
                removed += database.execute(
                    "DELETE FROM examples WHERE id IN (SELECT id FROM examples ORDER BY id LIMIT ?)", (over,)
                ).rowcount
        if removed:
            database.execute("UPDATE store SET count = count - ?", (removed,))
        return removed


def count_examples(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT count FROM store").fetchone()[0])


def recount(database: sqlite3.Connection) -> int:
    """Correct the stored count and next id by the rows, and return the count. Raises StoreError.

    A count that is too low would switch the quota off, and a low next id would meet existing rows.
    """
    count, last = database.execute("SELECT count(*), coalesce(max(id), 0) FROM examples").fetchone()
    known = database.execute("SELECT CASE WHEN typeof(next) = 'integer' THEN next END, count FROM store").fetchone()
    # Never lower than the stored one: an id that was used once stays used, so no old sealed row fits a new id.
    following = max(known[0] or 1, last + 1, 1)
    if following >= MAX_ID:
        raise StoreError(f"example store: example id {following - 1}: the database was tampered with")
    if known != (following, count):
        database.execute("UPDATE store SET count = ?, next = ?", (count, following))
    return int(count)
