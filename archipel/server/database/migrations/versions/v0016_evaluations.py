"""Which evaluations are of the versions that the rounds of a training made."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("evaluates", sa.String(32), nullable=True))
    op.create_index("ix_tasks_evaluates", "tasks", ["evaluates"])


def downgrade() -> None:
    op.drop_index("ix_tasks_evaluates", "tasks")
    op.drop_column("tasks", "evaluates")
