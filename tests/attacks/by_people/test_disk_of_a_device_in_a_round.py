"""Somebody reads the disk and the logs of a device that is in a round over neighbours, for the secrets of its masks.

The device keeps them, so that a restart does not end its part. Without its key the disk says nothing of them; with the
key, after the round, neither: they are erased.
"""

from __future__ import annotations

import base64
import logging
import shutil
from pathlib import Path

import pytest

from archipel.client import Event
from archipel.client.memory.erasing import erase
from archipel.client.memory.kept import FILES
from archipel.client.memory.keystore import DATA_KEY, FileKeys, data_key
from archipel.client.memory.vault import Vault
from archipel.errors import ClientError
from archipel.protocol.secagg_plus.state import read_state
from tests.client.rounds.neighbours.world import NeighbourWorld, opened

EVENTS = ("advertised", "shared", "masked", "uploaded", "confirmed")


def written(secret: bytes) -> list[bytes]:
    """The ways in which it could stand somewhere."""
    return [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret).encode()]


class Spy:
    """Copies the device's folder at each event, and with the device's key finds out what is secret in it."""

    def __init__(self, world: NeighbourWorld) -> None:
        self.world, self.secrets, self.copies, self.said = world, set[bytes](), list[Path](), list[str]()
        world.agent._on_event = self.look

    def look(self, event: Event) -> None:
        self.said.append(repr(event))
        if event.name not in EVENTS:
            return
        copy = self.world.folder / f"copy-{event.name}"
        shutil.copytree(self.world.agent.config.folder, copy)
        self.copies.append(copy)
        [entered] = self.world.agent._device.journal.unfinished()
        state = read_state(entered.kept.secrets().participant)
        shares = [share for pair in state.held.values() for share in pair]
        found = {state.cipher_secret, state.mask_secret, state.seed, *shares}
        if event.name in ("advertised", "shared"):
            found.add(entered.kept.vector(self.world.server.layout.length).tobytes())
        self.secrets |= found - {b""}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("server", ["malicious", "semi-honest"])
def test_disk_and_logs_without_the_key(
    tmp_path: Path, server: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG), opened(tmp_path, server) as world:
        spy = Spy(world)
        assert world.round().kind == "took_part"
        # Three secrets of its own, two shares of each of five dealers, and the vector.
        assert len(spy.secrets) == 3 + 2 * 5 + 1
        assert len(spy.copies) == len(EVENTS)
        heard = "".join([*spy.said, caplog.text, *capfd.readouterr()]).encode()
        on_disk = {path: path.read_bytes() for copy in spy.copies for path in files(copy) if path.name != DATA_KEY}
        for secret in spy.secrets:
            for form in written(secret):
                assert form not in heard
                assert not [path for path, data in on_disk.items() if form in data]
        # They are there, for whoever has the key and for nobody else.
        kept = [path for path in on_disk if path.suffix in FILES]
        assert {path.suffix for path in kept} == set(FILES)
        right, wrong = Vault(data_key(FileKeys(world.agent.config.folder))), Vault(b"n" * 32)
        for path in kept:
            assert right.read(path)
            with pytest.raises(ClientError):
                wrong.read(path)


def test_after_the_round_the_key_opens_nothing_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as world:
        spy = Spy(world)
        assert world.round().kind == "took_part"
        folder = world.agent.config.folder
        vault = Vault(data_key(FileKeys(folder)))
        plain = []
        for path in files(folder):
            data = path.read_bytes()
            plain.append(data)
            if data.startswith(b"archipel-sealed1"):
                plain.append(vault.read(path) or b"")
        assert spy.secrets
        assert not [secret for secret in spy.secrets if any(secret in data for data in plain)]


def test_an_erased_device_has_nothing_of_its_round(tmp_path: Path) -> None:
    with opened(tmp_path) as world:
        world.killed_at("shared")
        folder = world.agent.config.folder
        assert {path.suffix for path in files(folder)} >= set(FILES)
        world.agent.close()
        erase(folder)
        assert not [path for path in files(folder) if path.suffix in FILES]
