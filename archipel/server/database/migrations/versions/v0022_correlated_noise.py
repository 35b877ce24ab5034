"""The noise of which later rounds take back a part."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("privacy_events", sa.Column("noise", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("privacy_events", "noise")
