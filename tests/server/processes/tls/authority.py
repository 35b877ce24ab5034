"""Certificates of the tests' own, made with the `cryptography` package."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """A certification authority; `file` is its certificate."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(self._name, self._key.public_key(), 0).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.file = folder / f"{name}.pem"
        self._write(self.file, made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def certify(
        self, name: str, *, address: str = "127.0.0.1", since: float = -1, password: bytes | None = None
    ) -> tuple[Path, Path]:
        """Files of a certificate for `address`, valid for ten days from `since` (in days from now), and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key.public_key(), since).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False
        )
        certificate, private = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        self._write(certificate, made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
        self._write(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return certificate, private

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, since: float) -> x509.CertificateBuilder:
        begin = datetime.datetime.now(datetime.UTC) + since * DAY
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + 10 * DAY)
        )

    def _write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        path.chmod(0o600)
