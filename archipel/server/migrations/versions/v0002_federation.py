"""Who takes part in a task, and when devices are to come again."""

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
    with op.batch_alter_table("check_ins") as check_ins:
        check_ins.add_column(sa.Column("due", sa.Float(), nullable=False, server_default="0"))
        check_ins.drop_index(op.f("ix_check_ins_population_last_seen"))
        check_ins.create_index(op.f("ix_check_ins_last_seen"), ["last_seen"])
        check_ins.create_index(op.f("ix_check_ins_population_due"), ["population", "due"])
    # Devices of the first schema were told to come again within seconds, and count until they do.
    op.execute("UPDATE check_ins SET due = last_seen + 1 WHERE round_id IS NULL")
