"""gunicorn speaks TLS itself: real certificates, real handshakes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archipel.client import Agent, AgentConfig
from archipel.errors import TlsError, UnreachableError
from archipel.operator import OperatorClient
from archipel.protocol.identity import EnrolmentToken, mint_token
from archipel.protocol.sealed import public_bytes
from archipel.protocol.tls import client_context, server_context
from archipel.server import load_settings
from archipel.server.processes.tls import WebTls
from archipel.server.settings import Settings
from tests.server.processes.tls.authority import Authority
from tests.support.serving import SERVE, Server
from tests.support.world import DataFolder


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:
    made = Server(data_folder[0])
    yield made
    if made.alive:
        made.stop(signal.SIGKILL)


def agent(tmp_path: Path, data_folder: DataFolder, url: str, **tls: Any) -> Agent:
    folder, _, keys = data_folder
    config = AgentConfig(
        folder=tmp_path / secrets.token_hex(4), attempts=2, backoff=0.01, max_wait=0.1, read_timeout=5, **tls
    )
    seed = secrets.token_bytes(32)
    made = Agent(config, examples=dict)
    try:
        made.enrol(
            EnrolmentToken(
                server=url,
                server_key=load_settings(folder, environment={}).public_key,
                enrolment_key=public_bytes(keys.enrolment),
                publisher_keys=[public_bytes(keys.publisher)],
                population="pupils",
                seed=seed,
                certificate=mint_token(keys.enrolment, population="pupils", not_after=2**40, seed=seed),
            )
        )
    except BaseException:
        made.close()
        raise
    return made


@pytest.mark.sampled(every=8)
def test_a_check_in_over_tls(server: Server, authority: Authority, data_folder: DataFolder, tmp_path: Path) -> None:
    certificate, key = authority.certify("server")
    url = server.start(tls_certificate=str(certificate), tls_key=str(key))
    assert url.startswith("https://")
    with agent(tmp_path, data_folder, url, ca_file=authority.file) as device:
        assert device.run_once().kind == "waiting"
    with OperatorClient(url, data_folder[1], tls=client_context(authority.file)) as operator:
        assert operator.server.health().status == "ok"
    # Another authority, or the system's: nothing is sent.
    for wrong in ({}, {"ca_file": Authority(tmp_path, "another").file}):
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            agent(tmp_path, data_folder, url, **wrong)
    assert no_answer(url, data_folder, None) == (
        f"{url}: no answer to GET /v1/health (certificate verify failed: unable to get local issuer certificate; "
        "give its authority with --ca)"
    )
    # A certificate for another machine.
    elsewhere = url.replace("127.0.0.1", "localhost")
    with pytest.raises(UnreachableError, match="not valid for 'localhost'"):
        agent(tmp_path, data_folder, elsewhere, ca_file=authority.file)
    assert no_answer(elsewhere, data_folder, authority).endswith("not valid for 'localhost')")
    # Plain HTTP is not answered.
    assert "with TLS starts with https://" in no_answer(url.replace("https", "http"), data_folder, None)
    assert too_old(url) == "TLSV1_ALERT_PROTOCOL_VERSION"
    assert server.stop() == 0


def no_answer(url: str, data_folder: DataFolder, authority: Authority | None) -> str:
    """What the operator's client says."""
    tls = None if authority is None else client_context(authority.file)
    with OperatorClient(url, data_folder[1], tls=tls) as operator, pytest.raises(UnreachableError) as refusal:
        operator.server.health()
    return str(refusal.value)


@pytest.mark.sampled(every=4)
def test_tls_to_a_server_without_it(server: Server, data_folder: DataFolder) -> None:
    url = server.start().replace("http", "https")
    assert "without TLS starts with http://" in no_answer(url, data_folder, None)
    assert server.stop() == 0


def too_old(url: str) -> str:
    """What the server says to a client that speaks TLS 1.1 at most, or the version that they agreed on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, port = url.removeprefix("https://").split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as plain, context.wrap_socket(plain) as secured:
            return str(secured.version())
    except ssl.SSLError as error:
        return str(error.reason)


@pytest.mark.sampled(every=8)
def test_a_check_in_with_certificates_at_both_ends(
    server: Server, authority: Authority, data_folder: DataFolder, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    certificate, key = authority.certify("server")
    url = server.start(tls_certificate=str(certificate), tls_key=str(key), tls_client_ca=str(clients.file))
    mine, my_key = clients.certify("device")
    trusted = {"ca_file": authority.file}
    with agent(tmp_path, data_folder, url, **trusted, client_certificate=mine, client_key=my_key) as device:
        assert device.run_once().kind == "waiting"
    both = tmp_path / "both.pem"
    both.touch(0o600)
    both.write_bytes(my_key.read_bytes() + mine.read_bytes())
    with OperatorClient(url, data_folder[1], tls=client_context(authority.file, both)) as operator:
        assert operator.server.health().status == "ok"
    foreign, foreign_key = authority.certify("stranger")
    for wrong in ({}, {"client_certificate": foreign, "client_key": foreign_key}):
        with pytest.raises(UnreachableError):
            agent(tmp_path, data_folder, url, **trusted, **wrong)
    assert "give one with --client-certificate" in no_answer(url, data_folder, authority)
    refusals = [line for line in server_log(server) if "Traceback" in line]
    assert refusals == []
    assert server.stop() == 0


def server_log(server: Server) -> list[str]:
    return (server.folder / "server.log").read_text().splitlines()


@pytest.mark.sampled(every=4)
def test_commands_over_tls(server: Server, authority: Authority, data_folder: DataFolder, tmp_path: Path) -> None:
    certificate, key = authority.certify("server")
    url = server.start(tls_certificate=str(certificate), tls_key=str(key), tls_client_ca=str(authority.file))
    mine, my_key = authority.certify("operator")
    command = [sys.executable, "-m", "archipel", "task", "list", "--server", url]
    environment = {**os.environ, "ARCHIPEL_TOKEN": data_folder[1]}
    options = ["--ca", str(authority.file), "--client-certificate", str(mine), "--client-key", str(my_key)]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["task", "name"]), done
    environment |= {"ARCHIPEL_CA": str(authority.file), "ARCHIPEL_CLIENT_CERTIFICATE": str(my_key)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"archipel: {my_key}: no certificate in PEM\n")


@pytest.mark.sampled(every=8)
def test_a_renewed_certificate_is_used_without_a_restart(
    server: Server, authority: Authority, data_folder: DataFolder, tmp_path: Path
) -> None:
    certificate, key = authority.certify("server")
    url = server.start(tls_certificate=str(certificate), tls_key=str(key))
    first = shown(url, authority)
    # Half of it is there: the old one goes on being used.
    renewed, renewed_key = authority.certify("renewed")
    os.replace(renewed, certificate)
    assert shown(url, authority) == first
    os.replace(renewed_key, key)
    assert shown(url, authority) != first
    assert any("not the key of the certificate" in line for line in server_log(server))


def shown(url: str, authority: Authority) -> bytes:
    """The server's certificate."""
    host, port = url.removeprefix("https://").split(":")
    context = client_context(authority.file)
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        found = secured.getpeercert(binary_form=True)
        assert found is not None
        return found


@pytest.mark.sampled(every=4)
def test_files_that_cannot_be_used_are_named_before_anything_starts(
    authority: Authority, data_folder: DataFolder, tmp_path: Path
) -> None:
    good, good_key = authority.certify("good")
    expired, expired_key = authority.certify("expired", since=-11)
    future, future_key = authority.certify("future", since=2)
    _, locked = authority.certify("locked", password=b"secret")
    missing, junk, loose = tmp_path / "missing.pem", tmp_path / "junk.pem", tmp_path / "loose.key"
    junk.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    loose.write_bytes(good_key.read_bytes())
    loose.chmod(0o644)
    large = tmp_path / "large.pem"
    large.write_bytes(b"x" * ((1 << 20) + 1))
    cases = (
        (missing, good_key, None, f"{missing}: cannot be read (No such file or directory)"),
        (good, missing, None, f"{missing}: cannot be read (No such file or directory)"),
        (good, good_key, missing, f"{missing}: cannot be read (No such file or directory)"),
        (junk, good_key, None, f"{junk}: no certificate in PEM"),
        (good_key, good_key, None, f"{good_key}: no certificate in PEM"),
        (good, good_key, good_key, f"{good_key}: no certificate in PEM"),
        (good, junk, None, f"{junk}: no private key in PEM"),
        (good, good, None, f"{good}: no private key in PEM"),
        (good, locked, None, f"{locked}: the private key is encrypted"),
        (good, future_key, None, f"{future_key}: not the key of the certificate in {good}"),
        (expired, expired_key, None, f"{expired}: expired at "),
        (future, future_key, None, f"{future}: not valid before "),
        (good, loose, None, f"{loose}: everybody on this machine may use the private key"),
        (large, good_key, None, f"{large}: more than 1048576 bytes"),
    )
    settings = load_settings(data_folder[0], environment={})
    for certificate, key, clients, said in cases:
        with pytest.raises(TlsError) as caught:
            server_context(certificate, key, clients)
        assert str(caught.value).startswith(said)
        values = {"certificate": str(certificate), "key": str(key), "client_ca": str(clients or "")}
        with pytest.raises(TlsError):
            WebTls(settings.__class__(**{**as_dict(settings), **{f"tls_{name}": v for name, v in values.items()}}))
    for arguments, said in (
        ((missing,), f"{missing}: cannot be read"),
        ((junk,), f"{junk}: no certificate in PEM"),
        ((None, None, good_key), f"{good_key}: a client key needs its certificate"),
        ((None, good, future_key), f"{future_key}: not the key"),
        ((None, expired, expired_key), f"{expired}: expired at"),
    ):
        with pytest.raises(TlsError) as caught:
            client_context(*arguments)
        assert str(caught.value).startswith(said)
    environment = {**os.environ, "ARCHIPEL_SERVER_TLS_CERTIFICATE": str(expired)}
    environment["ARCHIPEL_SERVER_TLS_KEY"] = str(expired_key)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(data_folder[0]), "0"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {expired}: expired at ")
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - begun < 20
    assert not (data_folder[0] / "archipel.db").exists()


def as_dict(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_settings_that_contradict_each_other(data_folder: DataFolder) -> None:
    from archipel.errors import ServerError

    for name in ("tls_key", "tls_client_ca"):
        with pytest.raises(ServerError, match="need a tls_certificate"):
            load_settings(data_folder[0], environment={}, **{name: "x.pem"})


@pytest.mark.parametrize("secured", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.sampled(every=8)
def test_clients_that_fall_silent_do_not_keep_the_threads(
    server: Server, authority: Authority, data_folder: DataFolder, secured: bool
) -> None:
    certificate, key = authority.certify("server")
    tls = {"tls_certificate": str(certificate), "tls_key": str(key)} if secured else {}
    url = server.start(threads="2", concurrent_requests="1", stall_seconds="1.5", **tls)
    host, port = url.split("//")[1].split(":")
    silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(2)]
    context = client_context(authority.file)
    request = b"POST /v1/challenges HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    if secured:
        silent[0].sendall(b"\x16")  # the first byte of a handshake
        silent[1] = context.wrap_socket(silent[1], server_hostname=host)
        silent[1].sendall(request)
    else:
        silent[0].sendall(b"G")
        silent[1].sendall(request)
    begun = time.monotonic()
    with OperatorClient(url, data_folder[1], tls=context if secured else None) as operator:
        # Counted by its token: one that is counted by the address could come first, and the silent one be refused.
        assert list(operator.tasks.list()) == []
    assert time.monotonic() - begun < 8
    assert silent[1].recv(100).startswith(b"HTTP/1.1 503 ")
    assert silent[0].recv(100) == b""
    for connection in silent:
        connection.close()
    assert server.stop() == 0
    assert [line for line in server_log(server) if "Traceback" in line] == []
