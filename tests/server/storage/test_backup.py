"""A backup of a server in the middle of a round is put back elsewhere, and the round ends as it would have."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import load_public_key
from archipel.errors import ServerError
from archipel.server.app import create_app
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import load_settings
from archipel.server.storage.backup import back_up, restore
from tests.server.rounds.test_plain_rounds import mean, parameters, same, update
from tests.server.rounds.test_secure_round import expected_parameters, give_updates, new_parameters
from tests.support.world import World


def move_to(world: World, folder: Path, **settings: Any) -> None:
    """The world's server goes on with another data folder, as if the old machine were gone."""
    for services in (world.services, world.app.extensions["archipel"], world.coordinator._services):
        services.database.dispose()
    world.settings = load_settings(folder, environment={}, **settings)
    world.services = Services.open(world.settings, clock=world.clock)
    world.services.prepare()
    world.app = create_app(world.settings, clock=world.clock)
    world.coordinator = Coordinator(world.services)
    world.coordinator.recover()


@pytest.mark.sampled(every=4)
def test_a_secure_round_goes_on_from_its_backup(world: World, tmp_path: Path) -> None:
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    updates = give_updates(devices, [1, 2, 1])
    world.run_to("masking", devices)
    devices[0].masking()
    done = back_up(world.settings, tmp_path / "backup")
    assert (done.missing, done.database) == (0, True)
    assert restore(tmp_path / "backup", tmp_path / "new" / "server") == done
    move_to(world, tmp_path / "new" / "server")
    for device in devices[1:]:
        device.masking()
    world.settle()
    for phase in ("confirming", "unmasking"):
        for device in devices:
            device.answer(phase)
        world.settle()
    w, b = expected_parameters(updates)
    found = new_parameters(world, task)
    np.testing.assert_array_equal(found["w"], w)
    np.testing.assert_array_equal(found["b"], b)


@pytest.mark.sampled(every=6)
def test_a_backup_holds_what_was_acknowledged_and_checkpoints(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipel.server.rounds.folding.BATCH", 2)
    task = world.create_task(privacy="plain", threshold=None, cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    updates = [update(index, 1.0 + index) for index in range(4)]
    for device, values in zip(devices[:3], updates):
        device.updating(**values)
        world.settle()
    back_up(world.settings, tmp_path / "backup")
    # What happens after the backup is not in it.
    devices[3].updating(**update(77))
    world.settle()
    restore(tmp_path / "backup", tmp_path / "new")
    move_to(world, tmp_path / "new")
    devices[3].updating(**updates[3])
    world.settle()
    same(parameters(world, task), mean(updates))


@pytest.mark.sampled(every=4)
def test_a_backup_is_for_its_owner_alone_and_complete_or_not_there(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create_task()
    world.settle()
    target = tmp_path / "backup"
    back_up(world.settings, target)
    for path in (target, target / "server.key", target / "archipel.db"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    with pytest.raises(ServerError, match="exists already"):
        back_up(world.settings, target)
    with pytest.raises(ServerError, match="exists already"):
        restore(target, target)
    with pytest.raises(ServerError, match="not a backup"):
        restore(tmp_path, tmp_path / "other")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("archipel.server.storage.backup.copy_file", full)
    with pytest.raises(ServerError, match="No space left"):
        back_up(world.settings, tmp_path / "second")
    assert [path.name for path in tmp_path.iterdir()] == ["backup"]


@pytest.mark.sampled(every=4)
def test_a_relative_target_is_below_the_working_directory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create_task()
    world.settle()
    before = sorted(Path(world.settings.folder).rglob("*"))
    monkeypatch.chdir(tmp_path)
    done = back_up(world.settings, Path("backup"))
    assert sum(path.is_file() for path in (tmp_path / "backup" / "blobs").rglob("*")) == done.files > 0
    assert sorted(Path(world.settings.folder).rglob("*")) == before
    assert restore(Path("backup"), Path("new")) == done


@pytest.mark.sampled(every=3)
def test_a_backup_inside_the_data_folder_is_refused(world: World, tmp_path: Path) -> None:
    folder = Path(world.settings.folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    for target in (folder / "backup", folder / "blobs" / "backup", link / "backup", tmp_path / ".." / link / "b"):
        with pytest.raises(ServerError, match="lies in the data folder"):
            back_up(world.settings, target)
    assert not list(folder.rglob("backup*"))


@pytest.mark.sampled(every=3)
def test_a_restored_folder_has_the_public_key(world: World, tmp_path: Path) -> None:
    world.create_task()
    target = tmp_path / "backup"
    back_up(world.settings, target)
    expected = world.settings.public_key
    assert load_public_key(target / "server.key.pub") == expected
    (target / "server.key.pub").unlink()  # as in backups of before
    restore(target, tmp_path / "new")
    assert load_public_key(tmp_path / "new" / "server.key.pub") == expected


@pytest.mark.sampled(every=4)
def test_a_damaged_backup_is_not_put_back(world: World, tmp_path: Path) -> None:
    world.create_task()
    world.settle()
    target = tmp_path / "backup"
    back_up(world.settings, target)
    [first, *_] = sorted(path for path in (target / "blobs" / "sha256").rglob("*") if path.is_file())
    good = first.read_bytes()
    first.write_bytes(bytes(len(good)))
    with pytest.raises(ServerError, match="damaged"):
        restore(target, tmp_path / "new")
    first.unlink()
    with pytest.raises(ServerError, match="has no file"):
        restore(target, tmp_path / "new")
    first.write_bytes(good)
    database = (target / "archipel.db").read_bytes()
    (target / "archipel.db").write_bytes(database[:4096] + bytes(4096) + database[8192:])
    with pytest.raises(ServerError):
        restore(target, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (target / "archipel.db").write_bytes(database)
    restore(target, tmp_path / "new")
    with sqlite3.connect(tmp_path / "new" / "archipel.db") as made:
        assert made.execute("SELECT count(*) FROM tasks").fetchone() == (1,)
