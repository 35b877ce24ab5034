"""What a task's request says is in the request alone, but for what is asked for in conditions."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_COLUMNS: dict[str, tuple[sa.types.TypeEngine[Any], str | None]] = {
    "name": (sa.String(128), ""),
    "rounds": (sa.Integer(), "1"),
    "min_cohort": (sa.Integer(), "1"),
    "threshold": (sa.Integer(), "1"),
    "goal": (sa.Integer(), None),
    "max_contributions": (sa.Integer(), None),
    "rest_seconds": (sa.Float(), "0"),
    "hyperparameters": (sa.JSON(), "{}"),
    "deadlines": (sa.JSON(), "{}"),
}
"""Their types and what they have where nothing else is said; None: they may be null."""
_PHASES = {
    "assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "buffering", "updating",
    "aggregating",
}  # fmt: skip


def upgrade() -> None:
    tasks, connection = _tasks(), op.get_bind()
    for row in connection.execute(sa.select(tasks)).mappings().all():
        # The columns have what the request left to the server: the threshold, and the deadlines of that time.
        said = {name: row[name] for name in _COLUMNS if row[name] is not None}
        said["deadlines"] = {phase: ends for phase, ends in row["deadlines"].items() if phase in _PHASES}
        _store(tasks, row, request=json.dumps({**_request(row), **said}).encode())
    # Not in a batch, which makes SQLite's table anew: rounds and versions refer to its rows.
    for name in _COLUMNS:
        op.drop_column("tasks", name)


def downgrade() -> None:
    for name, (kind, default) in _COLUMNS.items():
        op.add_column("tasks", sa.Column(name, kind, nullable=default is None, server_default=default))
    tasks = _tasks()
    for row in op.get_bind().execute(sa.select(tasks)).mappings().all():
        request = _request(row)
        _store(tasks, row, **{name: request[name] for name in _COLUMNS if request.get(name) is not None})


def _tasks() -> sa.TableClause:
    known = {"task_id": sa.String(32), "request": sa.LargeBinary()}
    kinds: dict[str, Any] = {**known, **{name: kind for name, (kind, _) in _COLUMNS.items()}}
    return sa.table("tasks", *(sa.column(name, kind) for name, kind in kinds.items()))


def _request(row: Any) -> dict[str, Any]:
    return dict(json.loads(row["request"] or b"{}"))


def _store(tasks: sa.TableClause, row: Any, **values: Any) -> None:
    if values:
        changed = sa.update(tasks).where(tasks.c.task_id == row["task_id"]).values(**values)
        op.get_bind().execute(changed)
