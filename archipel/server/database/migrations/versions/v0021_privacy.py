"""The ledger of differential privacy."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "privacy_events",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("population", sa.String(128), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("task_id", sa.String(32), nullable=False),
        sa.Column("round_id", sa.String(32), nullable=False),
        sa.Column("event", sa.LargeBinary(), nullable=False),
        sa.Column("charged", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.task_id"], name="fk_privacy_events_task_id_tasks"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name="fk_privacy_events_round_id_rounds"),
        sa.PrimaryKeyConstraint("number", name="pk_privacy_events"),
    )
    op.create_index("ix_privacy_events_population_model", "privacy_events", ["population", "model"])
    op.create_index("ix_privacy_events_round_id", "privacy_events", ["round_id"])


def downgrade() -> None:
    op.drop_index("ix_privacy_events_round_id", "privacy_events")
    op.drop_index("ix_privacy_events_population_model", "privacy_events")
    op.drop_table("privacy_events")
