"""The private authority of `archipel serve init --tls-name`: certificates are read and checked by OpenSSL."""

from __future__ import annotations

import datetime
import signal
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from archipel.client.settings import load_device_settings
from archipel.errors import TlsError
from archipel.operator import OperatorClient
from archipel.protocol.tls import client_context
from archipel.server.authority import certify, make_authority
from tests.support.commands import Command
from tests.support.fixtures.commands import archipel  # noqa: F401
from tests.support.handshakes import handshake
from tests.support.serving import Server

NAMES = ("fl.example.org", "10.0.0.7", "fd00::7")


def test_a_client_takes_the_names_and_no_others(tmp_path: Path) -> None:
    make_authority(tmp_path, NAMES)
    for name in NAMES:
        assert handshake(tmp_path, name) == ""
    assert "not valid for 'other.example.org'" in handshake(tmp_path, "other.example.org")
    for file in ("ca.key", "server.pem"):
        assert stat.S_IMODE((tmp_path / "tls" / file).stat().st_mode) == 0o600


def test_a_new_certificate_has_the_same_names_and_another_key(tmp_path: Path) -> None:
    make_authority(tmp_path, NAMES)
    before = (tmp_path / "tls/server.pem").read_bytes()
    end = certify(tmp_path, days=3)
    assert abs((end - datetime.datetime.now(datetime.UTC)).total_seconds() - 3 * 86400) < 60
    after = (tmp_path / "tls/server.pem").read_bytes()
    first, second = (x509.load_pem_x509_certificate(each) for each in (before, after))
    assert first.public_key() != second.public_key()
    assert all(handshake(tmp_path, name) == "" for name in NAMES)


@pytest.mark.parametrize("name", ["", "http://fl.example.org", "fl.example.org:8470", "a..b", "*.example.org", "ü.de",
                                  "a" * 64, "-a.org", "10.0.0.0/8", "x\n", "." , "a." * 130 + "a"])  # fmt: skip
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TlsError, match=r"neither a DNS name, such as fl\.example\.org, nor an IP address"):
        make_authority(tmp_path, ["fl.example.org", name])
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"ca\.pem: No such file or directory; `archipel serve init --tls-name NAME`"):
        certify(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_authority(tmp_path / name, ["localhost"])
    (tmp_path / "a/tls/ca.key").write_bytes((tmp_path / "b/tls/ca.key").read_bytes())
    with pytest.raises(TlsError, match=r"ca\.key: not the key of tls/ca\.pem"):
        certify(tmp_path / "a")
    (tmp_path / "a/tls/ca.key").write_text("no key")
    with pytest.raises(TlsError, match="are not an authority's certificate and key"):
        certify(tmp_path / "a")


@pytest.mark.sampled(every=4)
def test_certificates_are_hard_to_set_up(
    archipel: Command,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not: one option for the server, one for a device, and `serve certificate` while the server runs."""
    monkeypatch.chdir(tmp_path)
    archipel("keys", "enrolment")
    archipel("keys", "publisher")
    out, _ = archipel(
        "serve", "init", "federation", "--enrolment-key", "enrolment.pub", "--publisher-key", "publisher.pub",
        "--token-file", "operator.token", "--tls-name", "127.0.0.1",
    )  # fmt: skip
    assert "federation/tls/ca.pem   (devices: `archipel device init --ca`; commands: --ca)" in out
    archipel("device", "init", "device.toml", "--ca", "federation/tls/ca.pem")
    assert load_device_settings(Path("device.toml")).config.ca_file == tmp_path / "federation/tls/ca.pem"
    server = Server(tmp_path / "federation")
    url = server.start()
    try:
        place = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        before = ssl.get_server_certificate(place)
        tls = client_context(tmp_path / "federation/tls/ca.pem")
        with OperatorClient(url, Path("operator.token").read_text().strip(), tls=tls) as operator:
            assert operator.tasks.list() is not None
        out, _ = archipel("serve", "certificate", "federation")
        assert "federation/tls/server.pem: valid until " in out
        after = ssl.get_server_certificate(place, ca_certs="federation/tls/ca.pem")
        assert after != before
        assert server.stop() == 0
    finally:
        if server.alive:
            server.stop(signal.SIGKILL)
