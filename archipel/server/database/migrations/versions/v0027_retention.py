"""Which blobs retention has deleted, and what a model's own rule keeps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"

_GOING = "deleted IS NOT NULL AND removed IS NULL"


def upgrade() -> None:
    op.add_column("blobs", sa.Column("deleted", sa.Float(), nullable=True))
    op.add_column("blobs", sa.Column("removed", sa.Float(), nullable=True))
    op.add_column("blobs", sa.Column("why", sa.String(256), server_default="", nullable=False))
    op.create_index(
        "ix_blobs_going", "blobs", ["digest"], sqlite_where=sa.text(_GOING), postgresql_where=sa.text(_GOING)
    )
    op.add_column("models", sa.Column("keep_versions", sa.Integer(), nullable=True))
    op.add_column("models", sa.Column("keep_days", sa.Float(), nullable=True))
    op.create_index("ix_versions_weights", "versions", ["weights"])
    op.create_index("ix_versions_strategy_state", "versions", ["strategy_state"])
    op.create_index("ix_model_versions_weights", "model_versions", ["weights"])


def downgrade() -> None:
    op.drop_index("ix_model_versions_weights", "model_versions")
    op.drop_index("ix_versions_strategy_state", "versions")
    op.drop_index("ix_versions_weights", "versions")
    op.drop_column("models", "keep_days")
    op.drop_column("models", "keep_versions")
    op.drop_index("ix_blobs_going", "blobs")
    op.drop_column("blobs", "why")
    op.drop_column("blobs", "removed")
    op.drop_column("blobs", "deleted")
