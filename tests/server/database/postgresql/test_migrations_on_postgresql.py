"""A database of the first schema on PostgreSQL, in the middle of a round, goes on with the newest."""

from __future__ import annotations

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, insert, select, text

from archipel.server.database.engine import MIGRATIONS, SCHEMA, Database
from archipel.server.database.tables import Base
from tests.server.database.test_migrations import before_requests_alone, there_and_back
from tests.server.storage.test_backup import move_to
from tests.support.cluster import Cluster
from tests.support.postgresql import administer
from tests.support.world import World

NEW = {"alembic_version", "challenges"}
"""Tables whose rows are not taken back: nothing is kept of a challenge any more."""


def take_back(world: World, url: str) -> set[str]:
    """Fill an empty database of the first schema with the same rows. Returns the tables copied."""
    before_requests_alone(str(world.services.database.engine.url.render_as_string(hide_password=False)))
    old = Database(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    first = MetaData()
    with old.engine.connect() as into, into.begin(), world.services.database.engine.connect() as out:
        config.attributes["connection"] = into
        command.upgrade(config, "0001")
        first.reflect(into)
        into.execute(text("SET LOCAL session_replication_role = replica"))  # foreign keys in any order
        for table in first.sorted_tables:
            rows = [] if table.name in NEW else [dict(row) for row in out.execute(select(table)).mappings()]
            if rows:
                into.execute(insert(table), rows)
    old.dispose()
    return {table.name for table in first.sorted_tables} - NEW


@pytest.mark.sampled(every=4)
def test_a_round_under_way_is_finished_after_the_upgrade(world: World, cluster: Cluster) -> None:
    task = world.create_task(rounds=2, cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    world.run_to("masking", devices)
    administer(cluster, "CREATE DATABASE first")
    try:
        assert take_back(world, cluster.url("first")) <= set(Base.metadata.tables)
        move_to(world, world.settings.path("."), database=cluster.url("first"), smallest_answer=1)
        with world.services.database.engine.connect() as connection:
            assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == SCHEMA
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        for phase in ("masking", "confirming", "unmasking"):
            for device in devices:
                device.answer(phase)
            world.settle()
        assert [each["phase"] for each in world.rounds(task["task_id"])] == ["committed"]
        world.clock.now += 1
        world.start_round(devices)
    finally:
        world.services.database.dispose()
        world.app.extensions["archipel"].database.dispose()
        administer(cluster, "DROP DATABASE first WITH (FORCE)")


@pytest.mark.sampled(every=4)
def test_settings_of_tasks_are_in_their_requests(world: World, database_url: str) -> None:
    there_and_back(world, database_url)
