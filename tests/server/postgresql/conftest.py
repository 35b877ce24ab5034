"""The worlds of the server's tests on PostgreSQL instead of SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archipel.server.http.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import load_settings
from tests.support.fixtures.postgresql import cluster as cluster
from tests.support.fixtures.postgresql import database_url as database_url
from tests.support.fixtures.postgresql import template as template
from tests.support.world import Clock, DataFolder, World


@pytest.fixture
def world(
    data_folder: DataFolder, bundle_file: Path, database_url: str, server_settings: dict[str, Any]
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
