"""Where a device's secrets are: its own files, or what its maker gives."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from archipel.client import Agent
from archipel.client.memory.keystore import DATA_KEY, DEVICE_KEY, FileKeys, data_key
from archipel.errors import ClientError
from tests.support.federation import Federation


class Memory:
    """A phone's key store, say: nothing of it is in the folder."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def store(self, name: str, secret: bytes) -> None:
        self.kept[name] = secret

    def delete(self, name: str) -> None:
        self.kept.pop(name, None)


def test_files_of_the_owner_alone(tmp_path: Path) -> None:
    keys = FileKeys(tmp_path)
    assert keys.load("device.key") is None
    keys.store("device.key", b"one")
    keys.store("device.key", b"two")
    assert keys.load("device.key") == b"two"
    assert (tmp_path / "device.key").stat().st_mode & 0o777 == 0o600
    keys.delete("device.key")
    keys.delete("device.key")
    assert not list(tmp_path.iterdir())
    (tmp_path / "device.key").write_bytes(b"x")
    (tmp_path / "device.key").chmod(0o644)
    with pytest.raises(ClientError, match="mode 644 lets others read"):
        keys.load("device.key")
    (tmp_path / "device.key").chmod(0o600)
    (tmp_path / "device.key").write_bytes(bytes(20_000))
    with pytest.raises(ClientError, match="not a key file"):
        keys.load("device.key")


def test_a_deleted_secret_is_overwritten_where_it_lay(tmp_path: Path) -> None:
    keys = FileKeys(tmp_path)
    keys.store("data.key", b"s" * 32)
    with open(tmp_path / "data.key", "rb") as file:
        keys.delete("data.key")
        left = file.read()
    assert len(left) == 32
    assert left != b"s" * 32


def test_the_data_key_is_made_once(tmp_path: Path) -> None:
    keys = FileKeys(tmp_path)
    key = data_key(keys)
    assert len(key) == 32
    assert data_key(FileKeys(tmp_path)) == key
    keys.store(DATA_KEY, b"short")
    with pytest.raises(ClientError, match=r"data\.key: 5 bytes, a key of 32"):
        data_key(keys)


@pytest.mark.sampled(every=4)
def test_the_owners_key_store_keeps_all_secrets(federation: Federation) -> None:
    keys = Memory()
    config = federation.config("device-0")
    with Agent(config, examples=lambda: federation.data(0), keys=keys) as agent:
        device_id = agent.enrol(federation.token())
        first = keys.kept[DEVICE_KEY]
        assert agent.rotate_key()
        assert keys.kept[DEVICE_KEY] != first
        assert set(keys.kept) == {DATA_KEY, DEVICE_KEY}
    assert not list(config.folder.glob("*.key*"))
    with Agent(config, examples=lambda: federation.data(0), keys=keys) as agent:
        assert agent.device_id == device_id
        others = [federation.agent(number) for number in (1, 2)]
        task = federation.task(cohort=3)
        stop = threading.Event()
        federation.run([agent, *others], lambda: federation.operator.tasks.get(task.task_id).state != "running")
        stop.set()
        assert federation.wait(task).state == "completed"
        assert [entry.result for entry in agent.rounds] == ["took_part"]
    # Another store: neither the identity nor what is sealed opens.
    with pytest.raises(ClientError, match=r"device\.key is not the key in device\.json"):
        Agent(config, examples=dict, keys=Memory())
