from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archipel.bundle import generate_key
from archipel.client import Agent
from archipel.client.connection.identity import RECORD_FILE, IdentityStore
from archipel.client.memory.keystore import DEVICE_KEY
from archipel.errors import CertificateError, ClientError, RefusedError, SignatureError, UnreachableError
from tests.support.federation import Federation


def test_enrolment_makes_a_key_that_only_the_owner_reads(federation: Federation) -> None:
    agent = federation.agent(0)
    folder = agent.config.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {name: (folder / name).stat().st_mode & 0o777 for name in (DEVICE_KEY, RECORD_FILE)} == {
        DEVICE_KEY: 0o600,
        RECORD_FILE: 0o600,
    }
    assert len(agent.device_id) == 32
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_enrolment_may_be_repeated_and_survives_a_restart(federation: Federation) -> None:
    agent = federation.agent(0, enrol=False)
    assert agent.device_id == ""
    token = federation.token()
    first = agent.enrol(token)
    assert agent.enrol(token) == first
    agent.close()
    with Agent(agent.config, examples=dict) as again:
        assert again.device_id == first
        assert again.run_once().kind == "waiting"


@pytest.mark.sampled(every=3)
def test_a_crash_before_the_answer_can_be_repeated(federation: Federation) -> None:
    agent = federation.agent(0, enrol=False)
    token = federation.token()
    first = agent.enrol(token)
    agent.close()
    # As if the process had been killed after the server stored the device, before it wrote its record.
    (agent.config.folder / RECORD_FILE).unlink()
    with Agent(agent.config, examples=dict) as again:
        assert again.enrol(token) == first


def test_a_crash_before_the_request_keeps_the_key(federation: Federation) -> None:
    agent = federation.agent(0, enrol=False, server="http://127.0.0.1:9")
    with pytest.raises(UnreachableError):
        agent.enrol(federation.token())
    key = (agent.config.folder / DEVICE_KEY).read_bytes()
    agent.close()
    with Agent(federation.config("device-0"), examples=dict) as again:
        again.enrol(federation.token())
        assert (again.config.folder / DEVICE_KEY).read_bytes() == key


def test_a_token_enrols_one_device(federation: Federation) -> None:
    token = federation.token()
    federation.agent(0, enrol=False).enrol(token)
    with pytest.raises(RefusedError) as caught:
        federation.agent(1, enrol=False).enrol(token)
    assert caught.value.status == 409


def test_an_expired_token_is_refused(federation: Federation) -> None:
    with pytest.raises(RefusedError, match="expired"):
        federation.agent(0, enrol=False).enrol(federation.token(not_after=int(time.time()) - 5))


def test_tokens_that_contradict_themselves_are_refused(federation: Federation) -> None:
    agent = federation.agent(0, enrol=False)
    with pytest.raises(CertificateError, match="another token's key"):
        agent.enrol(federation.token(seed=b"x" * 32))
    with pytest.raises(CertificateError):
        agent.enrol(federation.token(enrolment_key=generate_key().public_key().public_bytes_raw()))


def test_another_servers_token_is_refused_by_the_server(federation: Federation) -> None:
    with pytest.raises(RefusedError) as caught:
        federation.agent(0, enrol=False).enrol(federation.token(server_key=b"k" * 32))
    assert caught.value.status in (403, 422)


def test_one_folder_one_population(federation: Federation) -> None:
    agent = federation.agent(0)
    with pytest.raises(ClientError, match="enrolled already, in population 'pupils'"):
        agent.enrol(federation.token(population="staff"))


def test_one_folder_one_agent(federation: Federation) -> None:
    agent = federation.agent(0)
    with pytest.raises(ClientError, match="another agent is using it"):
        Agent(agent.config, examples=dict)
    agent.close()
    with pytest.raises(ClientError, match="was closed"):
        agent.run_once()


def test_a_folder_that_cannot_be_used_is_named(federation: Federation) -> None:
    (federation.folder / "file").write_text("in the way")
    with pytest.raises(ClientError, match="cannot be used"):
        Agent(federation.config("file/device"), examples=dict)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    store = IdentityStore(tmp_path)
    store.key()
    (tmp_path / DEVICE_KEY).chmod(0o640)
    with pytest.raises(ClientError, match="mode 640 lets others read"):
        store.key()


def test_a_damaged_key_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / DEVICE_KEY).write_bytes(b"-----BEGIN NOTHING")
    (tmp_path / DEVICE_KEY).chmod(0o600)
    with pytest.raises(SignatureError, match="not an unencrypted private key"):
        IdentityStore(tmp_path).key()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 2000), value=st.integers(0, 255), cut=st.integers(0, 2000))
@pytest.mark.sampled(every=4)
def test_a_damaged_record_is_a_record_or_the_documented_error(
    record: bytes, tmp_path: Path, at: int, value: int, cut: int
) -> None:
    changed = bytearray(record)
    changed[at % len(changed)] = value
    for data in (bytes(changed), record[: cut % len(record)]):
        (tmp_path / RECORD_FILE).write_bytes(data)
        with contextlib.suppress(ClientError):
            IdentityStore(tmp_path).record()
    (tmp_path / RECORD_FILE).write_bytes(record[:-2])
    with pytest.raises(ClientError, match=rf"{RECORD_FILE}: damaged"):
        IdentityStore(tmp_path).record()


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "corpus").glob("record-*.json")), ids=lambda p: p.stem)
def test_kept_damaged_records(path: Path, tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_bytes(path.read_bytes())
    with pytest.raises(ClientError, match=rf"{RECORD_FILE}: damaged"):
        IdentityStore(tmp_path).record()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from archipel.protocol.identity import EnrolmentToken, enrolment_request, mint_token
    from archipel.protocol.sealed import public_bytes

    folder = tmp_path_factory.mktemp("record")
    enrolment = generate_key()
    seed = bytes(range(32))
    token = EnrolmentToken(
        server="http://example.org",
        server_key=b"s" * 32,
        enrolment_key=public_bytes(enrolment),
        publisher_keys=[b"p" * 32],
        population="pupils",
        seed=seed,
        certificate=mint_token(enrolment, population="pupils", not_after=2**31, seed=seed),
    )
    store = IdentityStore(folder)
    store.record_enrolment(token, enrolment_request(token, store.key()).chain, token.server)
    return (folder / RECORD_FILE).read_bytes()
