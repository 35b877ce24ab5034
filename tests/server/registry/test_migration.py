"""Evaluations that were made before there was a registry are shown with the versions that they are of."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from alembic import command
from alembic.config import Config

from archipel.server.database.engine import MIGRATIONS, Database

WEIGHTS, BUNDLE = "5" * 64, "b" * 64
COLUMNS = {
    "name": "t", "population": "pupils", "bundle": BUNDLE, "state": "completed", "reason": "", "rounds": 1,
    "rounds_committed": 1, "failed_rounds": 0, "privacy": "plain", "min_cohort": 3, "cohort": 3, "threshold": 1,
    "hyperparameters": "{}", "deadlines": "{}", "created": 1.0,
}  # fmt: skip


def test_the_weights_of_evaluations_are_found_in_their_requests(tmp_path: Path) -> None:
    path = tmp_path / "archipel.db"
    database = Database(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
    tasks = {
        "1" * 32: ("evaluation", {"name": "t", "weights": WEIGHTS}),
        "2" * 32: ("evaluation", {"name": "t"}),
        "3" * 32: ("training", {"name": "t"}),
    }
    with sqlite3.connect(path) as old:
        bundle = (BUNDLE, "f" * 64, "tiny", 1, "", b"{}", 1.0)
        columns = "digest, file_digest, name, size, strategy, manifest, published"
        old.execute(f"INSERT INTO bundles ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", bundle)
        for task_id, (kind, request) in tasks.items():
            values = {**COLUMNS, "task_id": task_id, "kind": kind, "request": json.dumps(request).encode()}
            marks = ", ".join("?" * len(values))
            old.execute(f"INSERT INTO tasks ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
    database.migrate()
    database.check()
    with sqlite3.connect(path) as new:
        found = dict(new.execute("SELECT task_id, weights FROM tasks").fetchall())
        percentages = new.execute("SELECT DISTINCT salt, percent FROM tasks").fetchall()
    assert found == {"1" * 32: WEIGHTS, "2" * 32: None, "3" * 32: None}
    assert percentages == [(None, None)]
    database.dispose()
