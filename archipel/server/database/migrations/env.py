"""What Alembic runs: migrate over the connection that it is handed, inside that connection's transaction."""

from __future__ import annotations

from alembic import context

from archipel.server.database import (
    fault_tables,  # noqa: F401  (their tables are in Base.metadata once they are)
    privacy_tables,  # noqa: F401  (their tables are in Base.metadata once they are)
    registry_tables,  # noqa: F401  (their tables are in Base.metadata once they are)
    server_tables,  # noqa: F401  (their tables are in Base.metadata once they are)
)
from archipel.server.database.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()
