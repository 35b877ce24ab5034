"""An empty database of the server, and one cache of statements for all databases of a process."""

from __future__ import annotations

from tests.migrated import migrated_database
from tests.support import compiled_statements

__all__ = ["migrated_database"]

compiled_statements.share()
