"""One cache of compiled statements for all SQLite databases of a process, as a server has one for its only database.

SQLAlchemy keeps it with each engine, and tests open a database each: without this a third of a server test's processor
time is compiling the same statements again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import sqlalchemy
from sqlalchemy import URL, Engine

from archipel.server.database import engine as databases


@cache
def _first() -> Engine:
    made = sqlalchemy.create_engine("sqlite://", query_cache_size=2000)
    made.connect().close()  # the dialect asks the first connection what the library can do
    return made


def _create_engine(url: URL, **options: Any) -> Engine:
    made = sqlalchemy.create_engine(url, **options)
    if url.get_backend_name() == "sqlite":
        # The dialect is a part of the keys in the cache.
        made.dialect = made.pool._dialect = _first().dialect
        made._compiled_cache = _first()._compiled_cache
    return made


def share() -> None:
    """Databases that this process opens from now on compile each statement once."""
    databases.create_engine = _create_engine  # type: ignore[attr-defined, assignment]
