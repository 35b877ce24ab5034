"""What is personal is sealed on the disk, each file for its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.client import Event
from archipel.client.memory.vault import Vault
from archipel.errors import ClientError
from tests.support.federation import Federation

KEY = bytes(range(32))


def test_what_was_written_is_read_and_cannot_be_seen(tmp_path: Path) -> None:
    vault = Vault(KEY)
    path = tmp_path / "model.sealed"
    assert vault.read(path) is None
    secret = b"personal tensor " * 100
    for contents in (secret, b"", secret):
        vault.write(path, contents)
        assert Vault(KEY).read(path) == contents
    assert b"personal" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    first = path.read_bytes()
    vault.write(path, secret)
    assert path.read_bytes() != first


def test_a_file_in_anothers_place_or_under_another_key_is_not_read(tmp_path: Path) -> None:
    vault = Vault(KEY)
    vault.write(tmp_path / "a.sealed", b"state of a")
    (tmp_path / "b.sealed").write_bytes((tmp_path / "a.sealed").read_bytes())
    for reader, name in ((vault, "b.sealed"), (Vault(b"x" * 32), "a.sealed")):
        with pytest.raises(ClientError, match="damaged, or sealed with another key"):
            reader.read(tmp_path / name)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 500), bit=st.integers(0, 7), cut=st.integers(0, 500), more=st.binary(max_size=20))
@pytest.mark.sampled(every=4)
def test_every_changed_bit_is_noticed(tmp_path: Path, at: int, bit: int, cut: int, more: bytes) -> None:
    vault, path = Vault(KEY), tmp_path / "model.sealed"
    vault.write(path, b"state")
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[at % len(data)] ^= 1 << bit
    for changed in (bytes(flipped), data[: cut % len(data)], data + more + b"\0", more):
        path.write_bytes(changed)
        with pytest.raises(ClientError):
            vault.read(path)


def test_the_sealing_is_that_of_the_specification(tmp_path: Path) -> None:
    """Opened again without the vault: HKDF and XAES-256-GCM as their documents say, by the parts they are made of."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.cmac import CMAC
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    folder = tmp_path / "state"
    folder.mkdir()
    Vault(KEY).write(folder / "m.sealed", b"contents")
    data = (folder / "m.sealed").read_bytes()
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"archipel/agent/1/files").derive(KEY)
    nonce, sealed = data[16:40], data[40:]
    derived = b""
    for counter in (1, 2):
        mac = CMAC(AES(key))
        mac.update(b"\0" + bytes([counter]) + b"X\0" + nonce[:12])
        derived += mac.finalize()
    assert AESGCM(derived).decrypt(nonce[12:], sealed, b"state/m.sealed") == b"contents"
    with pytest.raises(InvalidTag):
        AESGCM(derived).decrypt(nonce[12:], sealed, b"state/n.sealed")


@pytest.mark.sampled(every=4)
def test_an_agent_leaves_nothing_personal_in_the_clear(federation: Federation) -> None:
    """The state counts steps: 4.0 in its file; an update of a plain round waits to be sent beside the journal."""
    seen: list[bytes] = []

    def on_event(event: Event) -> None:
        federation.events.append(event)
        if event.name == "masked" or event.name == "uploaded":
            rounds = federation.folder / "device-0" / "rounds"
            seen.extend(path.read_bytes() for path in rounds.iterdir() if path.suffix in (".masked", ".state"))

    agents = [federation.agent(0, on_event=on_event), *(federation.agent(number) for number in (1, 2))]
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"
    [path] = (agents[0].config.folder / "state").iterdir()
    seen.append(path.read_bytes())
    assert len(seen) >= 2
    four = np.float32(4.0).tobytes()
    assert float(federation.states(agents[0].config.folder)[0].state["seen"]) == 4.0
    for data in seen:
        assert data.startswith(b"archipel-sealed1")
        assert b"seen" not in data
        assert four not in data


@pytest.mark.sampled(every=4)
def test_a_damaged_state_is_a_refusal_that_names_the_file(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(3)]
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    [path] = (agents[0].config.folder / "state").iterdir()
    path.write_bytes(b"damaged")
    federation.task(name="again", cohort=3, deadlines={"advertising": 1.0})
    federation.run(agents, lambda: "refused" in federation.names(agents[0]))
    [refused] = [event for event in federation.events if event.name == "refused"]
    assert str(path) in refused.detail["reason"]
