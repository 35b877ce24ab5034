"""Logs statements that the database took long for, without their parameters."""

from __future__ import annotations

import logging
import time
from typing import Any

from sqlalchemy import event

from archipel.server.database.engine import Database

log = logging.getLogger("archipel.database")

MOST_CHARACTERS = 2000


def log_slow_queries(database: Database, milliseconds: float) -> None:
    """Log each statement of this process that takes so long or longer."""

    def before(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        context.archipel_slow_began = time.perf_counter()

    def after(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        took = 1000 * (time.perf_counter() - context.archipel_slow_began)
        if took >= milliseconds:
            # `values` are not shown: they are what devices and people sent.
            log.warning("slow query: %.0f ms: %s", took, " ".join(statement.split())[:MOST_CHARACTERS])

    for engine in database.engines:
        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)
