"""A development key that was found once, so that no test looks for one."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import save_private_key

PUBLIC = bytes.fromhex("49828b2ad9dde3e85948bd84d732e6c69fe19e1508360733c335302ff5cef8f8")
"""Its SHA-256 begins with 16 zero bits: `printf HEX | xxd -r -p | sha256sum`."""


def fixed_development_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes((14759).to_bytes(32, "big"))


def place_development_key(config_home: Path) -> Path:
    """Put the key where the commands of a user look for it."""
    path = config_home / "archipel" / "development.key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_private_key(fixed_development_key(), path)
    return path
