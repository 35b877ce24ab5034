"""Who asked for a task, and who approved of it; when the devices in a round's sum were settled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("created_by", sa.String(64), nullable=False, server_default=""))
    op.add_column("tasks", sa.Column("approved_by", sa.String(64), nullable=True))
    op.add_column("rounds", sa.Column("settled", sa.Float(), nullable=True))
