"""Who began a rollout, so that somebody else approves of its queries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("created_by", sa.String(64), nullable=False, server_default=""))
