"""TLS for both ends of a connection: version 1.2 or newer, and files that are checked before anything is sent.

All files are PEM. After a certificate its file may have those between it and the authority. A private key may be in the
same file as its certificate, and must not be encrypted.
"""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from archipel.errors import TlsError

OLDEST = ssl.TLSVersion.TLSv1_2
_MAX_FILE_BYTES = 1 << 20


def server_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """The TLS settings of a server with this certificate and private key.

    With `client_authority` every client must have a certificate by one of the authorities in that file. Raises
    TlsError, which names the file and says what is wrong with it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    _load(context, certificate, key)
    if client_authority is not None:
        _trust(context, client_authority)
        # Without this the authorities are loaded, but no certificate is asked for.
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    authority: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """The TLS settings of a client, which checks the server's name and certificate.

    Arguments:
        authority: a file with the authorities that may have signed it; None: the system's.
        certificate: the client's own certificate, where the server asks for one.
        key: its private key; None: it is in the same file.

    Raises TlsError, which names the file and says what is wrong with it.
    """
    if certificate is None and key is not None:
        raise TlsError(f"{key}: a client key needs its certificate")
    # With an authority of its own a client trusts that alone, and not the system's besides it.
    context = ssl.create_default_context() if authority is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = OLDEST
    if authority is not None:
        _trust(context, authority)
    if certificate is not None:
        _load(context, certificate, key or certificate)
    return context


def _trust(context: ssl.SSLContext, file: Path) -> None:
    # Only to check the file first: OpenSSL's own errors name no file.
    _certificates(file)
    try:
        context.load_verify_locations(cafile=file)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{file}: cannot be used ({error})") from None


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    own = _certificates(certificate)[0]
    now = datetime.datetime.now(datetime.UTC)
    if now < own.not_valid_before_utc:
        raise TlsError(f"{certificate}: not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
    if now > own.not_valid_after_utc:
        raise TlsError(f"{certificate}: expired at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    try:
        public = load_pem_private_key(_read(key), password=None).public_key()
    except TypeError:
        raise TlsError(f"{key}: the private key is encrypted; a server that starts by itself cannot ask") from None
    except ValueError:
        raise TlsError(f"{key}: no private key in PEM") from None
    # OpenSSL finds a wrong pair, too, but its error names no file.
    of_key, of_certificate = (
        each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for each in (public, own.public_key())
    )
    if of_key != of_certificate:
        raise TlsError(f"{key}: not the key of the certificate in {certificate}")
    if key.stat().st_mode & 0o007:
        raise TlsError(f"{key}: everybody on this machine may use the private key; run: chmod o-rwx {key}")
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{certificate}: cannot be used ({error})") from None


def _certificates(file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(file))
    except ValueError:
        raise TlsError(f"{file}: no certificate in PEM") from None


def _read(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            # One byte more shows that the file is larger, without reading all of it.
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TlsError(f"{file}: cannot be read ({error.strerror})") from None
    if len(data) > _MAX_FILE_BYTES:
        raise TlsError(f"{file}: more than {_MAX_FILE_BYTES} bytes")
    return data
