"""Devices that complaints exclude from a round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("participants", sa.Column("excluded", sa.Float(), nullable=True))
    op.add_column("shares", sa.Column("signature", sa.LargeBinary(64), nullable=False, server_default=""))
    op.add_column("rounds", sa.Column("complaints", sa.Integer(), nullable=False, server_default="0"))
