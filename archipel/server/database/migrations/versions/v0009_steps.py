"""How far each round moved the model, and whether its step was scaled down."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    for name in ("step_norm", "state_norm", "step_scale"):
        op.add_column("rounds", sa.Column(name, sa.Float(), nullable=True))
