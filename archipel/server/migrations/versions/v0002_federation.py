"""Who takes part in a task."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("tasks") as tasks:
        tasks.add_column(sa.Column("eligibility", sa.String(length=1024), nullable=False, server_default=""))
        tasks.add_column(sa.Column("max_contributions", sa.Integer(), nullable=True))
        tasks.add_column(sa.Column("rest_seconds", sa.Float(), nullable=False, server_default="0"))
