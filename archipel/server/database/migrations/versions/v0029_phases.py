"""When the phases of rounds began, and what devices were sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.add_column("rounds", sa.Column("phases", sa.JSON(), nullable=True))
    op.add_column("answers", sa.Column("fetched", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("answers", "fetched")
    op.drop_column("rounds", "phases")
