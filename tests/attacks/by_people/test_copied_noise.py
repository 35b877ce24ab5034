"""Whoever has the noise of correlated rounds and the models that they made has exact sums: where could it be had?

And a server that is set back, and knows rounds no more whose sums it has released, would take the noise of the rounds
before them back a second time, in sums of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.rounds.noise import kept_noise
from archipel.server.settings import load_settings
from archipel.server.storage.backup import back_up, restore
from tests.server.rounds.noisy import equal_weights, run_round
from tests.server.storage.test_backup import move_to
from tests.support.devices import Device
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World

NOISE = {
    "mechanism": "correlated", "noise_multiplier": 0.01, "delta": 1e-5, "separation": 2, "coefficients": [8, 6, 5],
}  # fmt: skip


class Running:
    """A task that has released two sums, each of three devices of six in turns."""

    def __init__(self, world: World, folder: Path) -> None:  # noqa: F811
        self.world = equal_weights(world, folder / "equal")
        self.task = self.world.create_task(differential_privacy=NOISE, rounds=9, cohort=3)["task_id"]
        devices = self.world.add_devices(6)
        self.groups: list[list[Device]] = [devices[:3], devices[3:]]
        for group in self.groups:
            run_round(self.world, group)
        with self.world.services.database.read() as session:
            self.paid = [row.round_id for row in session.query(PrivacyEvent).order_by(PrivacyEvent.number)]
        self.noise = [kept_noise.noise_of(self.world.services, round_id) for round_id in self.paid]


@pytest.fixture
def running(world: World, tmp_path: Path) -> Running:  # noqa: F811
    return Running(world, tmp_path)


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.mark.sampled(every=4)
def test_a_backup_has_no_noise_though_it_has_the_servers_keys(running: Running, tmp_path: Path) -> None:
    back_up(running.world.settings, tmp_path / "backup")
    cipher = AESGCM(load_settings(tmp_path / "backup", environment={}).noise_key)
    places = [f"{running.task}/{round_id}".encode() for round_id in running.paid]
    files = contents(tmp_path / "backup")
    # The database, settings and keys, the bundle and three models at least.
    assert len(files) >= 8
    for data in files:
        assert all(noise.tobytes() not in data for noise in running.noise)
        for place in places:
            with pytest.raises((InvalidTag, ValueError)):
                cipher.decrypt(data[:12], data[12:], place)
    # The attack is a good one: on the server's own disk it finds the noise of both rounds.
    found = []
    for data in contents(running.world.settings.blob_folder / "updates"):
        for place in places:
            try:
                found.append(cipher.decrypt(data[:12], data[12:], place))
            except InvalidTag:
                continue
    assert sorted(found) == sorted(noise.tobytes() for noise in running.noise)


@pytest.mark.sampled(every=6)
def test_the_disk_without_the_servers_key_has_no_noise(running: Running) -> None:
    folder = Path(running.world.settings.folder)
    for data in contents(folder):
        for noise in running.noise:
            assert noise.tobytes() not in data
            assert noise.astype(np.int32).tobytes() not in data


@pytest.mark.sampled(every=8)
def test_a_server_that_is_set_back_releases_no_more_sums_of_the_task(running: Running, tmp_path: Path) -> None:
    world = running.world  # noqa: F811
    back_up(world.settings, tmp_path / "backup")
    # The backup does not know of this one.
    run_round(world, running.groups[0])
    restore(tmp_path / "backup", tmp_path / "new")
    move_to(world, tmp_path / "new")
    for device in running.groups[0]:
        device.check_in()
    world.settle()
    shown = world.task(running.task)
    assert (shown["state"], shown["rounds_committed"]) == ("failed", 2)
    assert "backups do not have it" in shown["reason"]
    assert len(world.rounds(running.task)) == 2
