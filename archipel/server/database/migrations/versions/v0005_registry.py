"""The model registry: models, versions, promotions, rollouts; what devices run, and parts of populations for tasks."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    with op.batch_alter_table("check_ins") as check_ins:
        check_ins.add_column(sa.Column("versions", sa.JSON(none_as_null=True), nullable=True))
    with op.batch_alter_table("tasks") as tasks:
        tasks.add_column(sa.Column("weights", sa.String(length=64), nullable=True))
        tasks.add_column(sa.Column("salt", sa.String(length=128), nullable=True))
        tasks.add_column(sa.Column("percent", sa.Float(), nullable=True))
        tasks.create_index(op.f("ix_tasks_bundle"), ["bundle"])
    _fill_weights()
    op.create_table(
        "models",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("promoted", sa.Integer(), nullable=True),
        sa.Column("promotion", sa.Integer(), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_index(op.f("ix_models_population"), "models", ["population"])
    op.create_table(
        "model_versions",
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=False),
        sa.Column("weights", sa.String(length=64), nullable=True),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("task_id", sa.String(length=32), nullable=True),
        sa.Column("task_version", sa.Integer(), nullable=True),
        sa.Column("rejected", sa.Float(), nullable=True),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["bundle"], ["bundles.digest"], name=op.f("fk_model_versions_bundle")),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_model_versions_model")),
        sa.ForeignKeyConstraint(
            ["task_id", "task_version"],
            ["versions.task_id", "versions.number"],
            name=op.f("fk_model_versions_task_id_task_version"),
        ),
        sa.PrimaryKeyConstraint("model", "number", name=op.f("pk_model_versions")),
        sa.UniqueConstraint("model", "digest", name=op.f("uq_model_versions_model_digest")),
    )
    _create_rollouts()
    op.create_table(
        "promotions",
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("below", sa.Integer(), nullable=True),
        sa.Column("how", sa.String(length=16), nullable=False),
        sa.Column("rollout_id", sa.String(length=32), nullable=True),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=32), nullable=True),
        sa.Column("request_digest", sa.String(length=64), nullable=True),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_promotions_model")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_promotions_rollout_id")),
        sa.PrimaryKeyConstraint("model", "number", name=op.f("pk_promotions")),
        sa.UniqueConstraint("request_id", name=op.f("uq_promotions_request_id")),
    )
    op.create_table(
        "offer_serials",
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("population", name=op.f("pk_offer_serials")),
    )


def _fill_weights() -> None:
    """From the requests of evaluations, so that registered versions show them."""
    tasks = sa.table("tasks", *map(sa.column, ("task_id", "kind", "request", "weights")))
    connection = op.get_bind()
    found = sa.select(tasks.c.task_id, tasks.c.request).where(tasks.c.kind == "evaluation")
    for row in connection.execute(found).all():
        weights = json.loads(row.request or "{}").get("weights")
        connection.execute(sa.update(tasks).where(tasks.c.task_id == row.task_id).values(weights=weights))


def _create_rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("baseline", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("state_ends", sa.Float(), nullable=False),
        sa.Column("resumes", sa.String(length=16), nullable=True),
        sa.Column("left", sa.Float(), nullable=True),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("percent", sa.Float(), nullable=False),
        sa.Column("eligibility", sa.String(length=1024), nullable=False),
        sa.Column("salt", sa.String(length=128), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("request_digest", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_rollouts_model")),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_rollouts")),
    )
    op.create_index(op.f("ix_rollouts_model"), "rollouts", ["model"])
    op.create_index(
        "ix_rollouts_live",
        "rollouts",
        ["model"],
        unique=True,
        sqlite_where=sa.text("ended IS NULL"),
        postgresql_where=sa.text("ended IS NULL"),
    )
    op.create_table(
        "rollout_stages",
        sa.Column("rollout_id", sa.String(length=32), nullable=False),
        sa.Column("stage", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("started", sa.Float(), nullable=False),
        sa.Column("candidate_task", sa.String(length=32), nullable=True),
        sa.Column("baseline_task", sa.String(length=32), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=True),
        sa.Column("ended", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["baseline_task"], ["tasks.task_id"], name=op.f("fk_rollout_stages_baseline_task")),
        sa.ForeignKeyConstraint(["candidate_task"], ["tasks.task_id"], name=op.f("fk_rollout_stages_candidate_task")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name=op.f("fk_rollout_stages_rollout_id")),
        sa.PrimaryKeyConstraint("rollout_id", "stage", name=op.f("pk_rollout_stages")),
    )
