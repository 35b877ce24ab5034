"""Ed25519 keys as files: private ones as PKCS#8 PEM that only the owner can read, public ones as 64 hex digits."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from archipel.durable import create_durably, reason_of
from archipel.errors import SignatureError

_MAX_KEY_FILE_BYTES = 16 << 10
_DEVELOPMENT_MARK = b"\0\0"


def generate_key() -> Ed25519PrivateKey:
    """A new private key of the operating system's generator, never a development key.

    Example:
        key = generate_key()
        save_private_key(key, "publisher.key")
        save_public_key(key, "publisher.key.pub")
    """
    while True:
        key = Ed25519PrivateKey.generate()
        if not is_development_key(key.public_key().public_bytes_raw()):
            return key


def is_development_key(public_key: bytes) -> bool:
    """Whether this is a development key: the SHA-256 of its 32 raw bytes begins with 16 zero bits.

    The mark is in the key itself, so a publisher cannot leave it out of a bundle. One in 65,536 keys of other programs
    has it by chance; `generate_key` makes none.

    Example:
        assert not is_development_key(load_public_key("publisher.pub"))
    """
    return hashlib.sha256(public_key).digest().startswith(_DEVELOPMENT_MARK)


def save_private_key(key: Ed25519PrivateKey, path: Path | str) -> None:
    """Write the key as PEM with mode 0600, durably. Raises SignatureError if the file exists: it is not overwritten.

    Example:
        save_private_key(generate_key(), "publisher.key")
    """
    _create(Path(path), encode_private_key(key), 0o600)


def load_private_key(path: Path | str) -> Ed25519PrivateKey:
    """The key in a PEM file. Raises SignatureError that names the file and what is wrong with it.

    Example:
        key = load_private_key("publisher")
    """
    return decode_private_key(_read(Path(path)), str(path))


def encode_private_key(key: Ed25519PrivateKey) -> bytes:
    """The key as PKCS#8 PEM, not encrypted.

    Example:
        pem = encode_private_key(key)
    """
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def decode_private_key(data: bytes, where: str) -> Ed25519PrivateKey:
    """The inverse of `encode_private_key`. Raises SignatureError that names `where`, the source of `data`.

    Example:
        key = decode_private_key(Path("publisher").read_bytes(), "publisher")
    """
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise SignatureError(f"{where}: not an unencrypted private key in PEM; make one with `archipel keys`") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(
            f"{where}: expected an Ed25519 private key, got another kind; make one with `archipel keys`"
        )
    return key


def save_public_key(key: Ed25519PrivateKey, path: Path | str) -> None:
    """Write the public half as 64 hexadecimal digits. Raises SignatureError if the file exists.

    Example:
        save_public_key(key, "publisher.key.pub")
    """
    _create(Path(path), key.public_key().public_bytes_raw().hex().encode() + b"\n", 0o644)


def load_public_key(path: Path | str) -> bytes:
    """The raw 32 bytes. Raises SignatureError when the file does not hold 64 hexadecimal digits.

    Example:
        trusted = [load_public_key("publisher.pub")]
    """
    text = _read(Path(path)).strip()
    if b"PRIVATE KEY-----" in text:
        raise SignatureError(f"{path}: this is a private key; give its public half, {path}.pub")
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != 32 or len(text) != 64:
        raise SignatureError(f"{path}: expected 64 hexadecimal digits (an Ed25519 public key), got {len(text)} bytes")
    return key


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        create_durably(path, data, mode)
    except FileExistsError:
        raise SignatureError(f"{path}: exists already; move it away first, a key is never overwritten") from None
    except OSError as error:
        raise SignatureError(f"{path}: cannot be written ({reason_of(error)})") from None


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            # One byte over the limit shows that the file is larger, without reading all of it.
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise SignatureError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise SignatureError(f"{path}: larger than {_MAX_KEY_FILE_BYTES} bytes, so not a key file")
    return data
