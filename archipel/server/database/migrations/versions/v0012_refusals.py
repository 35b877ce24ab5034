"""Why devices take no part in rounds, counted by reason; and what devices have fetched is no more than that."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("participants", sa.Column("counted", sa.Float(), nullable=True))
    op.create_table(
        "refusals",
        sa.Column("round_id", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(16), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_refusals_round_id")),
        sa.PrimaryKeyConstraint("round_id", "reason", name=op.f("pk_refusals")),
    )
