"""Which devices can take part in secure rounds over neighbours with ML-KEM."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.add_column("check_ins", sa.Column("mlkem", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    op.drop_column("check_ins", "mlkem")
