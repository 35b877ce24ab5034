"""What each population may have, used nonces in place of open challenges, and the serials of plans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

# What was there before reaches the populations whose tasks and models name it. Broadcasts are told anew each round.
_KNOWN = (
    "SELECT bundle, population, task_id FROM tasks",
    "SELECT weights, population, task_id FROM tasks WHERE weights IS NOT NULL",
    "SELECT model, population, task_id FROM tasks WHERE model IS NOT NULL",
    "SELECT v.weights, t.population, t.task_id FROM versions v JOIN tasks t ON t.task_id = v.task_id",
    "SELECT v.bundle, m.population, 'model' FROM model_versions v JOIN models m ON m.name = v.model",
    "SELECT v.weights, m.population, 'model' FROM model_versions v JOIN models m ON m.name = v.model "
    "WHERE v.weights IS NOT NULL",
)


def upgrade() -> None:
    # Who asked for a challenge a minute ago asks again.
    op.drop_table("challenges")
    op.create_table(
        "used_nonces",
        sa.Column("nonce", sa.LargeBinary(length=32), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("nonce", name=op.f("pk_used_nonces")),
    )
    op.create_index(op.f("ix_used_nonces_expires"), "used_nonces", ["expires"])
    op.add_column("tasks", sa.Column("plan_serial", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "reaches",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("digest", "population", "reason", name=op.f("pk_reaches")),
    )
    op.execute(f"INSERT INTO reaches (digest, population, reason) {' UNION '.join(_KNOWN)}")
