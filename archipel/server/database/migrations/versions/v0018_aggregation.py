"""What a robust rule keeps from round to round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("rule_state", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("tasks", "rule_state")
