"""Devices that rest after they left a round, and how long devices take in the phases of rounds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

_COLUMNS = ("deadlines", "timings")


def upgrade() -> None:
    op.create_table(
        "rests",
        sa.Column("bundle", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("device_id", sa.String(32), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.Column("soonest", sa.Float(), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["bundle"], ["bundles.digest"], name=op.f("fk_rests_bundle")),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_rests_device_id")),
        sa.PrimaryKeyConstraint("bundle", "kind", "device_id", name=op.f("pk_rests")),
    )
    op.create_index(op.f("ix_rests_until"), "rests", ["until"])
    for name in _COLUMNS:
        op.add_column("rounds", sa.Column(name, sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("rounds", name)
    op.drop_table("rests")
