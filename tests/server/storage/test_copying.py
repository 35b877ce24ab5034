"""Moving a server from one kind of storage to another."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from archipel.cli.main import archipel
from archipel.errors import ServerError
from archipel.server import copy_files
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import load_settings
from archipel.server.storage.lock import LOCK_FILE, only_one
from tests.server.processes.coordinator.test_coordinator import set_updates
from tests.support.moto_process import TestBucket
from tests.support.places import InBucket, InFolder, WorldOnBucket
from tests.support.world import DataFolder


@pytest.fixture
def source(data_folder: DataFolder) -> InFolder:
    """A server's folder with two blobs and a live round, and things that are not the server's."""
    place = InFolder(load_settings(data_folder[0], environment={}))
    place.blobs.put(b"hello")
    place.blobs.put(random.Random(1).randbytes(17 << 20))
    place.spool.open_round("ab12")
    place.spool.keep("ab12", "d1", place.spool.receive("ab12", [b"update"]))
    place.spool.keep_sum("ab12", [b"sum"])
    return place


@pytest.mark.sampled(every=4)
def test_there_and_back(source: InFolder, bucket: TestBucket, tmp_path: Path) -> None:
    before = source.files()
    source.write("sha256/notes.txt", b"somebody's")
    source.blobs.receive([b"half written"])
    folder = source.settings.folder
    done = CliRunner().invoke(archipel, ["serve", "copy", folder, bucket.url], catch_exceptions=False)
    size = sum(map(len, before.values()))
    assert done.output.splitlines() == [
        f"4 files copied ({size} bytes), 0 were there; all have their digests",
        f'the server uses them with the setting  blobs = "{bucket.url}"',
    ]
    assert len(before) == 4
    there = InBucket(load_settings(folder, environment={}, blobs=bucket.url), bucket)
    assert there.files() == before
    # Again, after one was lost and one was damaged there.
    first, second, *_ = before
    there.delete(first)
    there.write(second, b"damaged")
    again = copy_files(source.settings, bucket.url)
    assert (again.files, again.there) == (2, 2)
    assert there.files() == before
    back = tmp_path / "back"
    assert copy_files(there.settings, str(back)).files == 4
    assert {
        path.relative_to(back).as_posix(): path.read_bytes() for path in back.rglob("*") if path.is_file()
    } == before


def test_a_relative_target_is_below_the_working_directory(
    source: InFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = source.settings.folder
    done = CliRunner().invoke(archipel, ["serve", "copy", folder, "blobs2"], catch_exceptions=False)
    assert done.output.splitlines()[1] == f'the server uses them with the setting  blobs = "{tmp_path}/blobs2"'
    assert InFolder(load_settings(folder, environment={}, blobs=f"{tmp_path}/blobs2")).files() == source.files()
    assert not (Path(folder) / "blobs2").exists()


@pytest.mark.sampled(every=4)
def test_damaged_sources_and_running_servers_are_refused(source: InFolder, bucket: TestBucket) -> None:
    digest = hashlib.sha256(b"hello").hexdigest()
    source.write(f"sha256/2c/{digest}", b"hellO")
    with pytest.raises(ServerError, match=f"sha256/2c/{digest}: damaged"):
        copy_files(source.settings, bucket.url)
    assert not any(digest in key for key in bucket.objects())
    with (
        only_one(source.settings.path(LOCK_FILE)),
        pytest.raises(ServerError, match="another server is running on this data folder"),
    ):
        copy_files(source.settings, bucket.url)
    with pytest.raises(ServerError, match="no such bucket"):
        copy_files(source.settings, "s3://not-there")
    with pytest.raises(ServerError, match="blobs must be a folder or s3://"):
        copy_files(source.settings, "gs://elsewhere")


@pytest.mark.sampled(every=4)
def test_a_round_goes_on_in_the_copy(world: WorldOnBucket, bucket: TestBucket, tmp_path: Path) -> None:
    """Stopped in the middle of a round, moved from the bucket to a folder, started again."""
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    expected = set_updates(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    assert copy_files(world.settings, str(tmp_path / "moved")).files == 7  # bundle, weights, five updates
    for name in list(bucket.objects()):
        bucket.delete(name)
    shutil.rmtree(world.settings.blob_cache)
    settings = load_settings(world.settings.folder, environment={}, blobs=str(tmp_path / "moved"))
    services = Services.open(settings, clock=world.clock)
    services.prepare()
    coordinator = Coordinator(services)
    while coordinator.step():
        pass
    with services.database.read() as session:
        digest = session.connection().exec_driver_sql("SELECT model FROM tasks").scalar()
    np.testing.assert_array_equal(services.blobs.read_weights(digest)["w"], expected)
    services.database.dispose()
    assert world.task(task["task_id"])["state"] == "completed"
