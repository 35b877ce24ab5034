"""The worlds of the server's tests on PostgreSQL instead of SQLite."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from archipel.server.database.engine import Database
from archipel.server.http.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import load_settings
from tests.server.conftest import Clock, Keys, World
from tests.server.postgresql.cluster import Cluster, find


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if find("initdb") is None:
        said = "needs PostgreSQL: scripts/install_postgres.sh --yes"
        if os.environ.get("CI") == "true":
            pytest.fail(said)
        pytest.skip(said)
    made = Cluster()
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def template(cluster: Cluster) -> str:
    """A migrated database, to be copied."""
    administer(cluster, "CREATE DATABASE template")
    database = Database(cluster.url("template"))
    database.migrate()
    database.dispose()
    return "template"


@pytest.fixture
def database_url(cluster: Cluster, template: str) -> Iterator[str]:
    name = f"t{secrets.token_hex(6)}"
    administer(cluster, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield cluster.url(name)
    administer(cluster, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def world(
    data_folder: tuple[Path, str, Keys], bundle_file: Path, database_url: str, server_settings: dict[str, Any]
) -> Iterator[World]:
    folder, token, keys = data_folder
    changes = {"smallest_answer": 1, **server_settings}
    settings = load_settings(folder, environment={}, database=database_url, **changes)
    clock = Clock()
    services = Services.open(settings, clock=clock)
    services.prepare()
    made = World(
        settings=settings, operator_token=token, keys=keys, clock=clock, services=services, bundle_file=bundle_file,
        app=create_app(settings, clock=clock), coordinator=Coordinator(services),
    )  # fmt: skip
    yield made
    services.database.dispose()
    made.app.extensions["archipel"].database.dispose()
    made.coordinator._services.database.dispose()


def administer(cluster: Cluster, statement: str) -> Any:
    engine = create_engine(cluster.url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))
    engine.dispose()
