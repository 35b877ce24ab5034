"""Devices that say that they leave a round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("participants", sa.Column("left", sa.Float(), nullable=True))
