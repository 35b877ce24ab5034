"""A private certification authority for a server that has no public name: one file that its devices trust.

FOLDER/tls/ca.pem       the authority's certificate, which devices and operators are given
FOLDER/tls/ca.key       its private key, which only `certify` reads
FOLDER/tls/server.pem   the server's certificate and its private key, in one file, so that both change at once
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from archipel.durable import create_durably, make_folder, write_durably
from archipel.errors import TlsError

FOLDER = "tls"
AUTHORITY_FILE = f"{FOLDER}/ca.pem"
KEY_FILE = f"{FOLDER}/ca.key"
SERVER_FILE = f"{FOLDER}/server.pem"
AUTHORITY_DAYS = 3650
SERVER_DAYS = 397
"""Apple's devices take no longer one, of private authorities neither."""
MAX_NAMES = 100
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_SLACK = datetime.timedelta(hours=1)
"""Before now, for clocks of devices that are behind."""


def read_names(given: Sequence[str]) -> list[x509.GeneralName]:
    """DNS names and IP addresses as a certificate has them. Raises TlsError, which names the wrong one."""
    if not 1 <= len(given) <= MAX_NAMES:
        raise TlsError(f"a certificate has 1 to {MAX_NAMES} names, got {len(given)}")
    names: list[x509.GeneralName] = []
    for text in dict.fromkeys(each.lower() for each in given):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(text)))
            continue
        except ValueError:
            pass
        if len(text) > 253 or not _NAME.fullmatch(text):
            raise TlsError(f"{text[:100]!r}: neither a DNS name, such as fl.example.org, nor an IP address")
        names.append(x509.DNSName(text))
    return names


def make_authority(folder: Path, names: Sequence[str]) -> None:
    """Make an authority and a server's certificate in the data folder, where there is none.

    The authority can certify these names alone, so whoever steals its key can pose as no other server. Raises TlsError
    for wrong names, FileExistsError where there is one.
    """
    found = read_names(names)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"archipel authority of {names[0]}"[:64])])
    made = (
        _builder(subject, subject, key.public_key(), _now() + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(_constraints(found), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    make_folder(folder / FOLDER, 0o700)
    create_durably(folder / KEY_FILE, _private(key), 0o600)
    create_durably(folder / AUTHORITY_FILE, made.public_bytes(Encoding.PEM), 0o644)
    certify(folder)


def certify(folder: Path, days: int = SERVER_DAYS) -> datetime.datetime:
    """Make a new certificate, with a new key, for all names of the authority in the data folder; returns its end.

    A server that runs takes it at once. Raises TlsError where there is no authority or its files do not fit.
    """
    authority, key = _read_authority(folder)
    constraints = authority.extensions.get_extension_for_class(x509.NameConstraints).value
    names = [_certified(each) for each in constraints.permitted_subtrees or ()]
    own = ec.generate_private_key(ec.SECP256R1())
    end = min(_now() + datetime.timedelta(days=days), authority.not_valid_after_utc)
    made = (
        _builder(x509.Name([]), authority.subject, own.public_key(), end)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_durably(folder / SERVER_FILE, made.public_bytes(Encoding.PEM) + _private(own), 0o600)
    return end


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        authority = x509.load_pem_x509_certificate((folder / AUTHORITY_FILE).read_bytes())
        key = load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
    except OSError as error:
        raise TlsError(
            f"{error.filename}: {error.strerror}; `archipel serve init --tls-name NAME` makes an authority"
        ) from None
    except ValueError:
        raise TlsError(f"{folder / FOLDER}: ca.pem and ca.key are not an authority's certificate and key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise TlsError(f"{folder / KEY_FILE}: not the key of {AUTHORITY_FILE}")
    if authority.not_valid_after_utc <= _now():
        raise TlsError(f"{folder / AUTHORITY_FILE}: expired; devices need a new authority's file")
    return authority, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _SLACK)
        .not_valid_after(end)
    )


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign, key_cert_sign=sign, crl_sign=sign, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _constraints(names: Sequence[x509.GeneralName]) -> x509.NameConstraints:
    """These names and no others. Of a kind that has none permitted all are, unless all are excluded (RFC 5280)."""
    excluded: list[x509.GeneralName] = []
    if not any(isinstance(name, x509.IPAddress) for name in names):
        excluded += [x509.IPAddress(ipaddress.ip_network(each)) for each in ("0.0.0.0/0", "::/0")]
    if not any(isinstance(name, x509.DNSName) for name in names):
        excluded.append(x509.DNSName(""))
    return x509.NameConstraints([_permitted(name) for name in names], excluded or None)


def _permitted(name: x509.GeneralName) -> x509.GeneralName:
    """The constraint that permits this name: an address is a network of itself."""
    return x509.IPAddress(ipaddress.ip_network(name.value)) if isinstance(name, x509.IPAddress) else name


def _certified(constraint: x509.GeneralName) -> x509.GeneralName:
    if not isinstance(constraint, x509.IPAddress):
        return constraint
    network = constraint.value
    if not isinstance(network, ipaddress.IPv4Network | ipaddress.IPv6Network) or network.num_addresses != 1:
        raise TlsError(f"{AUTHORITY_FILE}: permits a network of addresses, which archipel makes none for")
    return x509.IPAddress(network.network_address)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
