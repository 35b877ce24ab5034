"""The device whose update a training by FLTrust takes as its root."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("root", sa.String(32), nullable=True))


def downgrade() -> None:
    op.drop_column("tasks", "root")
