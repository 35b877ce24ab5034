"""Plain, asynchronous, evaluation and analytics rounds; running sums."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_COLUMNS = (
    "name", "population", "bundle", "rounds", "min_cohort", "cohort", "privacy", "threshold", "goal", "eligibility",
    "max_contributions", "rest_seconds", "hyperparameters", "deadlines",
)  # fmt: skip


def upgrade() -> None:
    with op.batch_alter_table("tasks") as tasks:
        tasks.add_column(sa.Column("request", sa.LargeBinary(), nullable=False, server_default=""))
        tasks.add_column(sa.Column("kind", sa.String(length=16), nullable=False, server_default="training"))
        tasks.add_column(sa.Column("mode", sa.String(length=20), nullable=False, server_default="semi-synchronous"))
        tasks.add_column(sa.Column("concurrency", sa.Integer(), nullable=True))
    tasks_table = sa.table("tasks", sa.column("task_id"), sa.column("request"), *map(sa.column, _COLUMNS))
    connection = op.get_bind()
    for row in connection.execute(sa.select(tasks_table)).mappings().all():
        values = {name: row[name] for name in _COLUMNS}
        for name in ("hyperparameters", "deadlines"):
            if isinstance(values[name], str):
                values[name] = json.loads(values[name])
        request = json.dumps({name: value for name, value in values.items() if value is not None}).encode()
        connection.execute(
            sa.update(tasks_table).where(tasks_table.c.task_id == row["task_id"]).values(request=request)
        )
    with op.batch_alter_table("rounds") as rounds:
        rounds.add_column(sa.Column("result", sa.JSON(none_as_null=True), nullable=True))
        rounds.add_column(sa.Column("sum_digest", sa.String(length=64), nullable=True))
    with op.batch_alter_table("participants") as participants:
        participants.add_column(sa.Column("ends", sa.Float(), nullable=True))
    with op.batch_alter_table("answers") as answers:
        answers.add_column(sa.Column("folded_into", sa.String(length=32), nullable=True))
        answers.create_index(op.f("ix_answers_folded_into"), ["folded_into"])
