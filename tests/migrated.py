"""The server's database as it is after its migrations, which take longer than most tests."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path


@functools.cache
def migrated_database() -> bytes:
    """The file of an empty SQLite database, which is made once in a process and its forks."""
    from archipel.server.database.engine import Database

    with tempfile.TemporaryDirectory(prefix="archipel-test-") as folder:
        path = Path(folder) / "archipel.db"
        database = Database(f"sqlite:///{path}")
        database.migrate()
        database.dispose()
        return path.read_bytes()
