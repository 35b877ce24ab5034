"""Edge servers: as members of this server's rounds, and this server as one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("check_ins", sa.Column("aggregator", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("tasks", sa.Column("upstream", sa.String(128)))
    op.create_table(
        "site_rounds",
        sa.Column("round_id", sa.String(32), primary_key=True),
        sa.Column("task_id", sa.String(32), sa.ForeignKey("tasks.task_id"), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("local_round", sa.String(32)),
        sa.Column("sum_digest", sa.String(64)),
        sa.Column("devices", sa.Integer()),
        sa.Column("sum_by", sa.Float(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.UniqueConstraint("local_round", name="uq_site_rounds_local_round"),
    )
    op.create_index("ix_site_rounds_task_id", "site_rounds", ["task_id"])
    op.create_index("ix_site_rounds_state", "site_rounds", ["state"])


def downgrade() -> None:
    op.drop_table("site_rounds")
    op.drop_column("tasks", "upstream")
    op.drop_column("check_ins", "aggregator")
