"""A database of the first schema, in the middle of a round, goes on with the newest."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import column, inspect, select, table, update

from archipel.server.database.engine import MIGRATIONS, SCHEMA, Database
from archipel.server.database.tables import Base, Task
from tests.server.storage.test_backup import move_to
from tests.support.world import World


def first_schema(path: Path) -> None:
    """An empty database as the first release made it."""
    _run(f"sqlite:///{path}", command.upgrade, "0001")


def before_requests_alone(url: str) -> None:
    """Back to the schema in which tasks have columns for everything that rounds need of their requests."""
    _run(url, command.downgrade, "0014")


def _run(url: str, step: Callable[[Config, str], None], revision: str) -> None:
    database = Database(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        step(config, revision)
    database.dispose()


def take_back(world: World, old: Path) -> list[str]:
    """Put a database of the first schema with the same rows in place of the world's. Returns the tables copied."""
    path = Path(world.settings.folder) / "archipel.db"
    for services in (world.services, world.app.extensions["archipel"], world.coordinator._services):
        services.database.dispose()
    first_schema(old)
    before_requests_alone(f"sqlite:///{path}")
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


@pytest.mark.sampled(every=8)
def test_a_round_under_way_is_finished_after_the_upgrade(world: World, tmp_path: Path) -> None:
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


ASKED: dict[str, Any] = {
    "name": "long", "rounds": 7, "min_cohort": 3, "cohort": 5, "threshold": 4, "goal": 4, "max_contributions": 9,
    "rest_seconds": 2.5, "hyperparameters": {"lr": 0.25},
}  # fmt: skip


def there_and_back(world: World, url: str) -> None:
    """What a task was asked for is the same after columns have had all of it, and are gone again."""
    tasks = [world.create_task(**ASKED, deadlines={"sharing": 33.0}), world.create_task(eligibility="ram > 1")]
    before = [world.task(task["task_id"]) for task in tasks]
    assert {name: before[0][name] for name in ASKED} == ASKED
    assert (before[0]["deadlines"]["sharing"], len(before[1]["deadlines"])) == (33.0, 10)
    world.services.database.dispose()
    before_requests_alone(url)

    database = Database(url)
    columns = select(*(column(name) for name in (*ASKED, "deadlines", "request"))).select_from(table("tasks"))
    of_first = column("task_id") == tasks[0]["task_id"]
    with database.engine.begin() as connection:
        found = connection.execute(columns.where(of_first)).mappings().one()
        values = {name: json.loads(value) if isinstance(value, str) and "{" in value else value
                  for name, value in found.items()}  # fmt: skip
        assert {name: values[name] for name in ASKED} == ASKED
        assert values["deadlines"] == before[0]["deadlines"]
        # As it was stored once: what the request left to the server is in the columns alone.
        request = json.loads(found["request"])
        del request["threshold"], request["deadlines"]
        old = update(table("tasks", column("request"), column("task_id"))).where(of_first)
        connection.execute(old.values(request=json.dumps(request).encode()))
    move_to(world, world.settings.path("."), database=world.settings.database, smallest_answer=1)
    assert {each["name"] for each in inspect(database.engine).get_columns("tasks")} == set(
        Task.__table__.columns.keys()
    )
    database.dispose()
    assert [world.task(task["task_id"]) for task in tasks] == before


@pytest.mark.sampled(every=4)
def test_settings_of_tasks_are_in_their_requests(world: World) -> None:
    there_and_back(world, f"sqlite:///{Path(world.settings.folder) / 'archipel.db'}")
