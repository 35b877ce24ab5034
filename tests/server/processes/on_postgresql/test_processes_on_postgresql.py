"""As fleets are served: rows in PostgreSQL, files in a bucket, processes that are killed during a secure round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text

from tests.server.storage.test_processes_on_object_store import (  # noqa: F401
    fleet,
    on_bucket,
    operator,
    server,
    test_a_secure_round_while_a_web_process_and_the_coordinator_are_killed,
)
from tests.support.fixtures.bucket import bucket, moto  # noqa: F401 - fixtures
from tests.support.world import DataFolder


@pytest.fixture(autouse=True)
def on_postgresql(database_url: str, data_folder: DataFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ARCHIPEL_SERVER_DATABASE", database_url)
    yield
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM rounds")).scalar() == 2
    engine.dispose()
    assert not (data_folder[0] / "archipel.db").exists()
