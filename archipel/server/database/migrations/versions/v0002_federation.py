"""Who takes part in a task, when devices are to come again, who may do what, what was done, and who coordinates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("tasks") as tasks:
        tasks.add_column(sa.Column("eligibility", sa.String(length=1024), nullable=False, server_default=""))
        tasks.add_column(sa.Column("max_contributions", sa.Integer(), nullable=True))
        tasks.add_column(sa.Column("rest_seconds", sa.Float(), nullable=False, server_default="0"))
        tasks.add_column(sa.Column("request_digest", sa.String(length=64), nullable=True))
    with op.batch_alter_table("check_ins") as check_ins:
        check_ins.add_column(sa.Column("due", sa.Float(), nullable=False, server_default="0"))
        check_ins.drop_index(op.f("ix_check_ins_population_last_seen"))
        check_ins.create_index(op.f("ix_check_ins_last_seen"), ["last_seen"])
        check_ins.create_index(op.f("ix_check_ins_population_due"), ["population", "due"])
    # Devices of the first schema were told to come again within seconds, and count until they do.
    op.execute("UPDATE check_ins SET due = last_seen + 1 WHERE round_id IS NULL")
    op.create_table(
        "access_tokens",
        sa.Column("token_id", sa.String(length=32), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("populations", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=True),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("token_id", name=op.f("pk_access_tokens")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_access_tokens_token_hash")),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=192), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("previous", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
    )
    _append_only("audit")
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=32), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )


def _append_only(table: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"""CREATE FUNCTION {table}_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'table {table} is append-only'; END $$"""
        )
        op.execute(
            f"""CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
            FOR EACH STATEMENT EXECUTE FUNCTION {table}_is_append_only()"""
        )
        return
    for what in ("UPDATE", "DELETE"):
        op.execute(
            f"""CREATE TRIGGER {table}_no_{what.lower()} BEFORE {what} ON {table}
            BEGIN SELECT RAISE(ABORT, 'table {table} is append-only'); END"""
        )
