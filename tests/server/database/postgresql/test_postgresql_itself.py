"""What PostgreSQL alone does: its schema, its rules, and writers at the same moment."""

from __future__ import annotations

import threading

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from archipel.protocol.operator.access import AuditEntry
from archipel.server.audit.chain import verify
from archipel.server.database.tables import Base, BundleRow
from tests.support.world import World


@pytest.mark.sampled(every=3)
def test_models_and_migrations_agree_here_too(world: World) -> None:
    with world.services.database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


@pytest.mark.sampled(every=3)
def test_the_audit_log_is_append_only_here_too(world: World) -> None:
    task = world.create_task()
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    entries = msgspec.convert(world.operator("GET", "/v1/audit")[1]["items"], list[AuditEntry])
    assert verify(entries)[0] == len(entries) == 3
    for statement in ("UPDATE audit SET actor = 'nobody'", "DELETE FROM audit WHERE seq = 2", "TRUNCATE audit"):
        with pytest.raises(DBAPIError, match="append-only"), world.services.database.write() as session:
            session.execute(text(statement))


@pytest.mark.sampled(every=4)
def test_entries_at_the_same_time_follow_each_other(world: World) -> None:
    bundle = world.publish()
    threads = [threading.Thread(target=world.create_task, kwargs={"bundle": bundle}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = msgspec.convert(world.operator("GET", "/v1/audit")[1]["items"], list[AuditEntry])
    assert verify(entries)[0] == len(entries) == 9


@pytest.mark.sampled(every=3)
def test_a_bundle_that_many_upload_at_once_is_there_once(world: World) -> None:
    data = world.bundle_file.read_bytes()
    barrier, statuses = threading.Barrier(8), []

    def upload() -> None:
        barrier.wait()
        statuses.append(world.operator("POST", "/v1/bundles", data)[0])

    threads = [threading.Thread(target=upload) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Whoever came in between is told to try again, and nobody that the server failed.
    assert set(statuses) <= {200, 201, 503}
    assert statuses.count(201) == 1
    assert world.operator("POST", "/v1/bundles", data)[0] == 200
    with world.services.database.read() as session:
        assert session.scalar(select(func.count()).select_from(BundleRow)) == 1
    published = [each for each in world.operator("GET", "/v1/audit")[1]["items"] if each["action"] == "bundle.publish"]
    assert len(published) == 1
