"""Which devices can take part in rounds whose devices add noise."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.add_column("check_ins", sa.Column("adds_noise", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    op.drop_column("check_ins", "adds_noise")
