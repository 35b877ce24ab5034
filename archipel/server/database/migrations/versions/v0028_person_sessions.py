"""People's sessions in the dashboard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.create_table(
        "person_sessions",
        sa.Column("session_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("token_id", sa.String(32), nullable=True),
        sa.Column("credential", sa.LargeBinary(32), nullable=True),
        sa.Column("subject", sa.String(48), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("populations", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("csrf", sa.String(64), nullable=False),
        sa.Column("opened", sa.Float(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("session_hash", name=op.f("pk_person_sessions")),
    )
    op.create_index(op.f("ix_person_sessions_token_id"), "person_sessions", ["token_id"])
    op.create_index(op.f("ix_person_sessions_expires"), "person_sessions", ["expires"])


def downgrade() -> None:
    op.drop_index(op.f("ix_person_sessions_expires"), "person_sessions")
    op.drop_index(op.f("ix_person_sessions_token_id"), "person_sessions")
    op.drop_table("person_sessions")
