"""pg_dump and then `back_up` are a backup of a server on PostgreSQL, in the middle of a round too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from archipel.server.storage.backup import back_up, restore
from tests.server.rounds.test_plain_rounds import mean, parameters, same, update
from tests.server.storage.test_backup import move_to
from tests.support.cluster import Cluster, find
from tests.support.postgresql import administer
from tests.support.world import World


def run(program: str, *arguments: str) -> None:
    path = find(program)
    assert path is not None
    subprocess.run([path, *arguments], check=True, capture_output=True, timeout=60)


@pytest.mark.sampled(every=4)
def test_a_dump_and_the_files_go_on_elsewhere(world: World, cluster: Cluster, tmp_path: Path) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    updates = [update(index, 1.0 + index) for index in range(3)]
    devices[0].updating(**updates[0])
    uri = world.settings.database.replace("postgresql+psycopg", "postgresql")
    run("pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", uri)
    done = back_up(world.settings, tmp_path / "backup")
    assert (done.database, done.missing) == (False, 0)

    administer(cluster, "CREATE DATABASE restored")
    run("pg_restore", "--no-owner", f"--dbname={cluster.url('restored')}", str(tmp_path / "dump"))
    restore(tmp_path / "backup", tmp_path / "new")
    move_to(world, tmp_path / "new", database=cluster.url("restored"))
    for device, values in zip(devices[1:], updates[1:], strict=True):
        device.updating(**values)
    world.settle()
    same(parameters(world, task), mean(updates))
