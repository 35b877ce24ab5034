"""What a deletion looks like from outside, and what keeps a file in place after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from archipel.bundle import read_weights
from archipel.protocol.operator.access import AuditEntry
from archipel.server.app import create_app
from archipel.server.audit.chain import verify
from archipel.server.database.tables import WeightsEntry
from archipel.server.settings import load_settings
from archipel.server.storage.backup import back_up, restore
from archipel.server.storage.blob_rows import record_blob
from archipel.server.storage.holds import holding
from tests.server.retention.training import audited, deleted, pass_days, rows, statuses, there, train, weights_of
from tests.support.fleet import MODEL, Fleet
from tests.support.world import Clock, World


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"keep_versions": 1, "keep_days": 10.0}


@pytest.mark.sampled(every=4)
def test_a_deleted_version_says_so_everywhere(world: World) -> None:
    task = train(world, 3)
    weights = weights_of(world, task)
    fleet = Fleet(world).create(0, promote=None)
    for number in (1, 2):
        fleet.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": number}, 201)
    before = {entry["subject"] for entry in audited(world, "blob.delete")}
    pass_days(world, 11)
    when = world.clock.now
    assert deleted(world, weights) == [True, True, False, False]
    assert before == set()

    status, problem = world.operator("GET", f"/v1/blobs/{weights[1]}")
    assert (status, problem["status"], problem["type"]) == (410, 410, "urn:archipel:problem:gone")
    assert weights[1] in problem["detail"]
    assert "the newest 1 versions and those of the last 10 days are kept" in problem["detail"]
    assert world.operator("GET", f"/v1/blobs/{weights[1]}/pieces")[0] == 410

    version = fleet.get(f"models/{MODEL}/versions/1")
    assert version["weights"] == weights[1]
    assert version["weights_deleted"] == when
    assert "retention rule" in version["deleted_why"]
    assert fleet.get(f"models/{MODEL}/versions/2")["weights_deleted"] is None
    results = fleet.get(f"tasks/{task['task_id']}/metrics")["items"]
    assert [each["weights_deleted"] for each in results] == [when, None, None]
    assert world.task(task["task_id"])["weights_deleted"] is None

    # One entry for each file, in a log that is whole; and the weights log still has its statements.
    entries = audited(world, "blob.delete")
    assert {entry["subject"] for entry in entries} == set(weights[:2])
    assert {(entry["actor"], entry["detail"]["kind"]) for entry in entries} == {("coordinator", "weights")}
    log = msgspec.convert(world.operator("GET", "/v1/audit")[1]["items"], list[AuditEntry])
    assert verify(log)[0] == len(log)
    with world.services.database.read() as session:
        assert list(session.scalars(select(WeightsEntry.weights).order_by(WeightsEntry.number))) == weights


@pytest.mark.sampled(every=4)
def test_nobody_can_use_what_is_deleted(world: World) -> None:
    task = train(world, 3)
    weights = weights_of(world, task)
    fleet = Fleet(world).create(1)
    fleet.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": 1}, 201)
    fleet.add_version()
    pass_days(world, 11)
    assert deleted(world, weights) == [True, True, True, False]
    for path, body, status in (
        (f"models/{MODEL}/promote", {"version": 2}, 409),
        ("rollouts", {
            "model": MODEL, "version": 2, "stages": [{"percent": 9, "soak_seconds": 9}], "gate": "none",
        }, 409),
        (f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": 2}, 422),
        ("tasks", {
            "name": "e", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 3, "min_contributors": 3,
            "kind": "evaluation", "metrics": {"accuracy": 1.0}, "bundle": task["bundle"], "weights": weights[1],
            "privacy": "plain",
        }, 422),
    ):  # fmt: skip
        problem = fleet.post(path, body, status)
        assert "were deleted" in problem["detail"], path
    assert fleet.model()["promoted"] == 1


@pytest.mark.sampled(every=3)
def test_a_file_goes_a_day_later(world: World) -> None:
    weights = weights_of(world, train(world, 2))
    pass_days(world, 11)
    assert (statuses(world, weights), there(world, weights)) == ([410, 410, 200], [True] * 3)
    pass_days(world, 0.9)
    assert there(world, weights) == [True] * 3
    pass_days(world, 0.2)
    assert (statuses(world, weights), there(world, weights)) == ([410, 410, 200], [False, False, True])
    assert [row.removed is not None for row in (rows(world)[digest] for digest in weights)] == [True, True, False]


@pytest.mark.sampled(every=3)
def test_a_download_under_way_ends_well(world: World) -> None:
    weights = weights_of(world, train(world, 2))
    with world.app.test_client() as client:
        header = {"Authorization": f"Bearer {world.operator_token}"}
        with client.get(f"/v1/blobs/{weights[0]}", headers=header, buffered=False) as response:
            pass_days(world, 11)
            pass_days(world, 2)
            assert there(world, weights[:1]) == [False]
            data = response.get_data()
    (Path(world.settings.folder) / "got").write_bytes(data)
    assert set(read_weights(Path(world.settings.folder) / "got")) == {"w", "b"}


@pytest.mark.sampled(every=3)
def test_no_file_goes_while_a_backup_is_made(world: World) -> None:
    weights = weights_of(world, train(world, 2))
    with holding(world.services.storage):
        pass_days(world, 11)
        pass_days(world, 5)
        assert deleted(world, weights) == [True, True, False]
        assert there(world, weights) == [True] * 3
    pass_days(world, 1)
    assert there(world, weights) == [False, False, True]
    assert list(world.services.storage.keys("backups")) == []


@pytest.mark.sampled(every=3)
def test_a_hold_that_nobody_renews_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = world.services.storage
    weights = weights_of(world, train(world, 2))
    monkeypatch.setattr("archipel.server.storage.holds.SECONDS", -1.0)
    with holding(storage):
        assert len(list(storage.keys("backups"))) == 1
        pass_days(world, 11)
        pass_days(world, 2)
        assert there(world, weights) == [False, False, True]


def test_a_long_backup_renews_its_hold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = world.services.storage
    monkeypatch.setattr("archipel.server.storage.holds._RENEW_SECONDS", 0.0)
    with holding(storage) as renew:
        before = list(storage.keys("backups"))
        monkeypatch.setattr("archipel.server.storage.holds.SECONDS", 9e5)
        renew()
        after = list(storage.keys("backups"))
        assert len(before) == len(after) == 1
        assert before != after
    assert list(storage.keys("backups")) == []


@pytest.mark.sampled(every=4)
def test_a_backup_of_any_moment_can_be_restored(world: World, tmp_path: Path) -> None:
    """Before a deletion, between it and the removal of the files, and after that."""
    weights = weights_of(world, train(world, 2))
    moments = {"before": 0.0, "between": 11.0, "after": 2.0}
    for name, days in moments.items():
        pass_days(world, days)
        back_up(world.settings, tmp_path / name)
    for name in moments:
        restore(tmp_path / name, tmp_path / f"{name}-restored")
        settings = load_settings(tmp_path / f"{name}-restored", environment={})
        app = create_app(settings, clock=Clock(world.clock.now))
        header = {"Authorization": f"Bearer {world.operator_token}"}
        with app.test_client() as client:
            found = []
            for digest in weights:
                with client.get(f"/v1/blobs/{digest}", headers=header) as response:
                    found.append(response.status_code)
        app.extensions["archipel"].database.dispose()
        assert found == ([200] * 3 if name == "before" else [410, 410, 200]), name


@pytest.mark.parametrize("days", [0.0, 2.0], ids=["the file is still there", "the file is gone"])
@pytest.mark.sampled(every=4)
def test_the_same_bytes_may_come_again(world: World, days: float) -> None:
    task = train(world, 2)
    old = weights_of(world, task)[0]
    pass_days(world, 11)
    pass_days(world, days)
    assert there(world, [old]) == [days == 0]
    # Version 0 of a training of the same bundle is the same file.
    again = world.create_task(bundle=task["bundle"], privacy="plain", threshold=None, cohort=3, name="again")
    world.settle()
    assert weights_of(world, again) == [old]
    assert (statuses(world, [old]), deleted(world, [old])) == ([200], [False])
    pass_days(world, 5)
    assert (statuses(world, [old]), there(world, [old])) == ([200], [True])


@pytest.mark.sampled(every=4)
def test_a_file_that_is_removed_while_it_is_stored_again_is_not_named(world: World) -> None:
    task = train(world, 2)
    old = weights_of(world, task)[0]
    data = (world.settings.blob_folder / f"sha256/{old[:2]}/{old}").read_bytes()
    pass_days(world, 11)
    assert world.services.blobs.put(data) == old
    pass_days(world, 2)  # retention removes the file between `put` and the transaction that names it
    blobs, now = world.services.blobs, world.clock.now
    with pytest.raises(FileNotFoundError, match="was removed"), world.services.database.write() as session:
        record_blob(session, blobs, digest=old, kind="weights", size=len(data), now=now)
    assert deleted(world, [old]) == [True]
    blobs.put(data)
    with world.services.database.write() as session:
        record_blob(session, blobs, digest=old, kind="weights", size=len(data), now=now)
    assert (deleted(world, [old]), there(world, [old])) == ([False], [True])


@pytest.mark.sampled(every=4)
def test_bytes_of_another_kind_keep_the_file(world: World) -> None:
    """A blob has one file however many kinds of rows it has."""
    old = weights_of(world, train(world, 2))[0]
    pass_days(world, 11)
    with world.services.database.write() as session:
        record_blob(session, world.services.blobs, digest=old, kind="state", size=1, now=world.clock.now)
    pass_days(world, 2)
    assert (deleted(world, [old]), there(world, [old]), statuses(world, [old])) == ([True], [True], [410])
    pass_days(world, 30)  # the state has no version and no task
    pass_days(world, 2)
    assert there(world, [old]) == [False]
