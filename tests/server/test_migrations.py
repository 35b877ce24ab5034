"""A database of the first schema, in the middle of a round, goes on with the newest."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config

from archipel.server.database.engine import MIGRATIONS, SCHEMA, Database
from archipel.server.database.tables import Base


def first_schema(path: Path) -> None:
    """An empty database as the first release made it."""
    database = Database(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    database.dispose()


def take_back(world: Any, old: Path) -> list[str]:
    """Put a database of the first schema with the same rows in place of the world's. Returns the tables copied."""
    path = Path(world.settings.folder) / "archipel.db"
    for services in (world.services, world.app.extensions["archipel"], world.coordinator._services):
        services.database.dispose()
    first_schema(old)
    with sqlite3.connect(old) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables.remove("alembic_version")
        tables.remove("challenges")  # nothing is kept of a challenge any more
        connection.execute(f"ATTACH '{path}' AS new")
        for table in tables:
            columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({table})"))
            connection.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        connection.commit()
    for file in path.parent.glob("archipel.db*"):
        file.unlink()
    old.rename(path)
    for file in old.parent.glob(f"{old.name}-*"):
        file.rename(path.with_name(path.name + file.name.removeprefix(old.name)))
    return tables


def test_a_round_under_way_is_finished_after_the_upgrade(world: Any, tmp_path: Path) -> None:
    task = world.create_task(rounds=2, cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    world.run_to("masking", devices)
    tables = take_back(world, Path(world.settings.folder) / "old.db")
    assert set(tables) <= set(Base.metadata.tables)

    world.services.prepare()
    with sqlite3.connect(Path(world.settings.folder) / "archipel.db") as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (SCHEMA,)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    world.restart_coordinator()
    for phase in ("masking", "confirming", "unmasking"):
        for device in devices:
            device.answer(phase)
        world.settle()
    [first] = world.rounds(task["task_id"])
    assert first["phase"] == "committed"
    world.clock.now += 1
    world.start_round(devices)
    shown = world.task(task["task_id"])
    assert (shown["eligibility"], shown["max_contributions"], shown["rest_seconds"]) == ("", None, 0.0)
