"""Rounds that are groups of one round."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "part_of": sa.String(32), "place": sa.Integer(), "group_sum": sa.String(64),
}  # fmt: skip


def upgrade() -> None:
    for name, kind in _COLUMNS.items():
        op.add_column("rounds", sa.Column(name, kind, nullable=True))
    op.create_index("ix_rounds_part_of", "rounds", ["part_of"])


def downgrade() -> None:
    op.drop_index("ix_rounds_part_of", "rounds")
    for name in _COLUMNS:
        op.drop_column("rounds", name)
