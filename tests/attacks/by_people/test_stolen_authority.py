"""Somebody who has stolen the key of a server's private authority certifies other servers with it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from archipel.server.authority import make_authority
from tests.support.handshakes import handshake

NAMES = ("fl.example.org", "10.0.0.7", "fd00::7")


def forge(folder: Path, name: x509.GeneralName) -> Path:
    """A certificate for another name, by somebody who has stolen the authority's key."""
    authority = x509.load_pem_x509_certificate((folder / "tls/ca.pem").read_bytes())
    key = load_pem_private_key((folder / "tls/ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(authority.subject, x509.Name([]), key.public_key(), 7, now, now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "forged.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(made.public_bytes(Encoding.PEM) + private)
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("names", [("fl.example.org",), ("10.0.0.7",), NAMES], ids=["name", "address", "both"])
def test_a_stolen_authority_certifies_nobody_else(tmp_path: Path, names: tuple[str, ...]) -> None:
    make_authority(tmp_path, names)
    for name in ("bank.example.com", "10.0.0.8", "fd00::8"):
        try:
            forged = forge(tmp_path, x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            forged = forge(tmp_path, x509.DNSName(name))
        assert handshake(tmp_path, name, forged) in ("permitted subtree violation", "excluded subtree violation")


def test_the_forgery_would_be_taken_for_the_servers_own_name(tmp_path: Path) -> None:
    """So it is the name alone that the others are refused for."""
    make_authority(tmp_path, NAMES)
    assert handshake(tmp_path, "fl.example.org", forge(tmp_path, x509.DNSName("fl.example.org"))) == ""
