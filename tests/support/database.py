"""The server's database as it is after its migrations, which take longer than most tests."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from archipel.server.database.engine import Database
from tests.support import compiled_statements

compiled_statements.share()


@functools.cache
def migrated_database() -> bytes:
    """The file of an empty SQLite database, which is made once in a process."""
    with tempfile.TemporaryDirectory(prefix="archipel-test-") as folder:
        path = Path(folder) / "archipel.db"
        database = Database(f"sqlite:///{path}")
        database.migrate()
        database.dispose()
        return path.read_bytes()
