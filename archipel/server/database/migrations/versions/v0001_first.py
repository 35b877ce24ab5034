"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "blobs",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", "kind", name=op.f("pk_blobs")),
    )
    op.create_table(
        "bundles",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("file_digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("strategy", sa.String(length=128), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("published", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_bundles")),
    )
    op.create_table(
        "devices",
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("device_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("token_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("chain", sa.LargeBinary(), nullable=False),
        sa.Column("enrolled", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("device_id", name=op.f("pk_devices")),
        sa.UniqueConstraint("token_key", name=op.f("uq_devices_token_key")),
    )
    op.create_table(
        "challenges",
        sa.Column("nonce", sa.LargeBinary(length=32), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_challenges_device_id")),
        sa.PrimaryKeyConstraint("nonce", name=op.f("pk_challenges")),
    )
    op.create_index(op.f("ix_challenges_device_id"), "challenges", ["device_id"], unique=False)
    op.create_index(op.f("ix_challenges_expires"), "challenges", ["expires"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("token_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_sessions_device_id")),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_device_id"), "sessions", ["device_id"], unique=False)
    op.create_index(op.f("ix_sessions_expires"), "sessions", ["expires"], unique=False)
    op.create_table(
        "tasks",
        sa.Column("task_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("rounds_committed", sa.Integer(), nullable=False),
        sa.Column("failed_rounds", sa.Integer(), nullable=False),
        sa.Column("privacy", sa.String(length=16), nullable=False),
        sa.Column("min_cohort", sa.Integer(), nullable=False),
        sa.Column("cohort", sa.Integer(), nullable=False),
        sa.Column("threshold", sa.Integer(), nullable=False),
        sa.Column("goal", sa.Integer(), nullable=True),
        sa.Column("hyperparameters", sa.JSON(), nullable=False),
        sa.Column("deadlines", sa.JSON(), nullable=False),
        sa.Column("model", sa.String(length=64), nullable=True),
        sa.Column("strategy_state", sa.String(length=64), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["bundle"], ["bundles.digest"], name=op.f("fk_tasks_bundle")),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_tasks")),
    )
    op.create_index(op.f("ix_tasks_state"), "tasks", ["state"], unique=False)
    op.create_table(
        "rounds",
        sa.Column("round_id", sa.String(length=32), nullable=False),
        sa.Column("task_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("phase_ends", sa.Float(), nullable=False),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("plan_digest", sa.String(length=64), nullable=False),
        sa.Column("update_bytes", sa.BigInteger(), nullable=False),
        sa.Column("weights_in", sa.String(length=64), nullable=False),
        sa.Column("weights_out", sa.String(length=64), nullable=True),
        sa.Column("weight_sum", sa.Float(), nullable=True),
        sa.Column("started", sa.Float(), nullable=False),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.task_id"], name=op.f("fk_rounds_task_id")),
        sa.PrimaryKeyConstraint("round_id", name=op.f("pk_rounds")),
    )
    op.create_index(
        "ix_rounds_live",
        "rounds",
        ["round_id"],
        unique=False,
        sqlite_where=sa.text("ended IS NULL"),
        postgresql_where=sa.text("ended IS NULL"),
    )
    op.create_index(op.f("ix_rounds_task_id"), "rounds", ["task_id"], unique=False)
    op.create_table(
        "answers",
        sa.Column("round_id", sa.String(length=32), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("received", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_answers_device_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_answers_round_id")),
        sa.PrimaryKeyConstraint("round_id", "phase", "device_id", name=op.f("pk_answers")),
    )
    op.create_table(
        "check_ins",
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.Column("attributes", sa.JSON(), nullable=False),
        sa.Column("round_id", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_check_ins_device_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_check_ins_round_id")),
        sa.PrimaryKeyConstraint("device_id", name=op.f("pk_check_ins")),
    )
    op.create_index(op.f("ix_check_ins_population_last_seen"), "check_ins", ["population", "last_seen"], unique=False)
    op.create_index(op.f("ix_check_ins_round_id"), "check_ins", ["round_id"], unique=False)
    op.create_table(
        "participants",
        sa.Column("round_id", sa.String(length=32), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_participants_device_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_participants_round_id")),
        sa.PrimaryKeyConstraint("round_id", "device_id", name=op.f("pk_participants")),
    )
    op.create_table(
        "shares",
        sa.Column("round_id", sa.String(length=32), nullable=False),
        sa.Column("recipient", sa.String(length=32), nullable=False),
        sa.Column("sender", sa.String(length=32), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(length=512), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_shares_round_id")),
        sa.PrimaryKeyConstraint("round_id", "recipient", "sender", name=op.f("pk_shares")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "versions",
        sa.Column("task_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("weights", sa.String(length=64), nullable=False),
        sa.Column("strategy_state", sa.String(length=64), nullable=True),
        sa.Column("parent", sa.String(length=64), nullable=True),
        sa.Column("round_id", sa.String(length=32), nullable=True),
        sa.Column("cohort", sa.Integer(), nullable=False),
        sa.Column("weight_sum", sa.Float(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_versions_round_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.task_id"], name=op.f("fk_versions_task_id")),
        sa.PrimaryKeyConstraint("task_id", "number", name=op.f("pk_versions")),
        sa.UniqueConstraint("round_id", name=op.f("uq_versions_round_id")),
    )
