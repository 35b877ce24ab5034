"""What /healthz and /readyz say, part by part."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from sqlalchemy import text

from archipel.server.app import create_app
from archipel.server.processes.lease import Lease
from tests.support.world import World


@pytest.fixture
def lease(world: World) -> Lease:
    made = Lease(world.services.database, "a" * 32, clock=world.clock, seconds=10)
    assert made.take()
    return made


def ask(world: World) -> tuple[int, str]:
    with world.app.test_client() as client:
        response = client.get("/readyz")
        assert client.get("/healthz").get_json() == {"status": "alive"}  # whatever is wrong
        return response.status_code, response.get_data(as_text=True)


@pytest.mark.sampled(every=3)
def test_a_server_that_works_is_ready(world: World, lease: Lease) -> None:
    assert ask(world) == (200, '{"status":"ready"}')


def test_without_a_coordinator_it_is_not(world: World, lease: Lease) -> None:
    world.clock.now += 13
    status, said = ask(world)
    assert status == 503
    assert "coordinator: the last one's lease expired 3 s ago" in said
    assert lease.take()
    assert ask(world)[0] == 200
    lease.give_back()
    assert "coordinator: none works now" in ask(world)[1]


def test_without_its_schema_it_is_not(world: World, lease: Lease) -> None:
    with world.services.database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    status, said = ask(world)
    assert status == 503
    assert "database: schema 0001, expected" in said


def test_with_a_lost_database_it_is_not_and_tells_no_address(world: World, lease: Lease) -> None:
    world.services.database.dispose()
    for services in (world.services, world.app.extensions["archipel"]):
        services.database.dispose()
    path = world.settings.path("archipel.db")
    path.unlink()
    path.mkdir()
    status, said = ask(world)
    assert status == 503
    assert "database: it cannot be used" in said
    assert str(path) not in said
    assert "sqlite" not in said.lower()
    with world.app.test_client() as client:
        assert "sqlite" not in client.get("/v1/health").get_data(as_text=True).lower()


def test_where_nothing_can_be_stored_it_is_not(world: World, lease: Lease) -> None:
    (world.settings.blob_folder / "incoming").rmdir()
    status, said = ask(world)
    assert status == 503
    assert "storage: nothing can be stored" in said
    assert world.settings.folder not in said


def test_on_a_full_disk_it_is_not(world: World, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    full: Any = type("Usage", (), {"free": 3 << 20, "total": 1 << 30, "used": 0})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    status, said = ask(world)
    assert status == 503
    assert "disk: 3 MiB free for data, at least 16 are needed" in said


@pytest.mark.sampled(every=3)
def test_before_it_stops_it_is_not(world: World, lease: Lease) -> None:
    world.app.extensions["archipel"].database.dispose()
    world.app = create_app(world.settings, clock=world.clock, draining=lambda: True)
    status, said = ask(world)
    assert status == 503
    assert "about to stop" in said
