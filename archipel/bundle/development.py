"""Development keys: publishers' keys for trying things out, which everybody who verifies can tell from real ones."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle.keys import encode_private_key, is_development_key, load_private_key
from archipel.durable import create_durably
from archipel.errors import SignatureError

DEVELOPMENT_KEY = "development.key"


def generate_development_key() -> Ed25519PrivateKey:
    """A new development key, found by trying about 65,536 keys of the operating system's generator: 1 to 5 seconds.

    Example: see `archipel.bundle.development_key`.
    """
    while True:
        key = Ed25519PrivateKey.generate()
        if is_development_key(key.public_key().public_bytes_raw()):
            return key


def development_key_file() -> Path:
    """Where this user's development key is: archipel/development.key in the folder of the user's settings.

    Example:
        print(development_key_file())
    """
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "archipel" / DEVELOPMENT_KEY


def development_key() -> tuple[Ed25519PrivateKey, bool]:
    """This user's development key, and whether this call has made it (with mode 600).

    Raises SignatureError that names the file if it cannot be read or written, or if it holds another kind of key.

    Example:
        key, made = development_key()
    """
    path = development_key_file()
    if not path.exists():
        data = encode_private_key(generate_development_key())
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_durably(path, data, 0o600)
        except FileExistsError:
            # Another process was faster; its key is the user's.
            return _load(path), False
        except OSError as error:
            remedy = "set XDG_CONFIG_HOME to a folder that can be written, or make a key: archipel keys FILE"
            raise SignatureError(f"{path}: cannot be written ({error.strerror}); {remedy}") from None
        return _load(path), True
    return _load(path), False


def _load(path: Path) -> Ed25519PrivateKey:
    key = load_private_key(path)
    if not is_development_key(key.public_key().public_bytes_raw()):
        raise SignatureError(f"{path}: not a development key; move it away, and `archipel keys` makes one there")
    return key
