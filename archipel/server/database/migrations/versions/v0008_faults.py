"""Attributed faults, devices set aside, and searches for whoever spoils rounds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("spoiled_rounds", sa.Integer(), server_default="0", nullable=False))
    op.add_column("rounds", sa.Column("spoiled", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("rounds", sa.Column("draw", sa.JSON(none_as_null=True), nullable=True))
    op.create_table(
        "faults",
        sa.Column("round_id", sa.String(length=32), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.String(length=128), nullable=False),
        sa.Column("noted", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_faults_device_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_faults_round_id")),
        sa.PrimaryKeyConstraint("round_id", "device_id", "reason", name=op.f("pk_faults")),
    )
    op.create_index(op.f("ix_faults_device_id_noted"), "faults", ["device_id", "noted"])
    op.create_table(
        "quarantines",
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=128), nullable=False),
        sa.Column("detail", sa.String(length=512), nullable=False),
        sa.Column("round_id", sa.String(length=32), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.Column("released", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_quarantines_device_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_quarantines_round_id")),
        sa.PrimaryKeyConstraint("device_id", name=op.f("pk_quarantines")),
    )
    op.create_index(op.f("ix_quarantines_population_until"), "quarantines", ["population", "until"])
    op.create_index(op.f("ix_quarantines_round_id"), "quarantines", ["round_id"])
    op.create_table(
        "searches",
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("began", sa.Float(), nullable=False),
        sa.Column("last_spoiled", sa.Float(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("spoiled", sa.Integer(), nullable=False),
        sa.Column("quiet", sa.Integer(), nullable=False),
        sa.Column("absent", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("population", name=op.f("pk_searches")),
    )
    op.create_table(
        "suspects",
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("logs", sa.JSON(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("spoiled", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_suspects_device_id")),
        sa.ForeignKeyConstraint(["population"], ["searches.population"], name=op.f("fk_suspects_population")),
        sa.PrimaryKeyConstraint("device_id", name=op.f("pk_suspects")),
    )
    op.create_index(op.f("ix_suspects_population"), "suspects", ["population"])
