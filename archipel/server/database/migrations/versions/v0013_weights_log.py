"""The weights log: where each version's weights come from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "weights_log",
        sa.Column("population", sa.String(128), nullable=False),
        sa.Column("bundle", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("weights", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("statement", sa.LargeBinary(), nullable=False),
        sa.Column("evidence", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["bundle"], ["bundles.digest"], name=op.f("fk_weights_log_bundle_bundles")),
        sa.PrimaryKeyConstraint("population", "bundle", "number", name=op.f("pk_weights_log")),
    )
    op.create_index(
        op.f("ix_weights_log_population_bundle_weights"), "weights_log", ["population", "bundle", "weights"]
    )
