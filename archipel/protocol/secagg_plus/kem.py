"""ML-KEM-768 (FIPS 203), where the installed `cryptography` has it; built on OpenSSL before 3.5 it has not.

Encapsulation draws its own randomness: the library has no form that is given it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm

from archipel.errors import PolicyError, SecureAggregationError

PUBLIC_BYTES = 1184
CIPHERTEXT_BYTES = 1088
KEY_BYTES = 32
SEED_BYTES = 64


@functools.cache
def is_available() -> bool:
    """Whether keys can be made here."""
    try:
        _library().MLKEM768PrivateKey.from_seed_bytes(bytes(SEED_BYTES))
    except (ImportError, UnsupportedAlgorithm):
        return False
    return True


def require(whose: str) -> None:
    """Raises PolicyError, which names `whose` library it is, where keys cannot be made."""
    if not is_available():
        raise PolicyError(
            f"protocol 'neighbours-mlkem': {whose} cryptography has no ML-KEM-768; install a later one, which is "
            "built on OpenSSL 3.5 or later"
        )


def private_key(seed: bytes) -> Any:
    """The key of 64 bytes, d and z of FIPS 203."""
    return _library().MLKEM768PrivateKey.from_seed_bytes(seed)


def public_key(private: Any) -> bytes:
    """The encapsulation key, 1,184 bytes."""
    return bytes(private.public_key().public_bytes_raw())


def check_public(public: bytes, what: str) -> None:
    """Raises SecureAggregationError unless it passes the checks of FIPS 203, section 7.2."""
    try:
        _library().MLKEM768PublicKey.from_public_bytes(public)
    except ValueError:
        raise SecureAggregationError(f"{what} is not an ML-KEM-768 public key") from None


def encapsulate(public: bytes) -> tuple[bytes, bytes]:
    """A new K (32 bytes), and the ciphertext (1,088 bytes) from which the owner of `public` gets it."""
    shared, ciphertext = _library().MLKEM768PublicKey.from_public_bytes(public).encapsulate()
    return bytes(shared), bytes(ciphertext)


def decapsulate(private: Any, ciphertext: bytes) -> bytes:
    """K; of a ciphertext that nobody made for this key, 32 bytes that nobody knows."""
    return bytes(private.decapsulate(ciphertext))


def _library() -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.asymmetric.mlkem")
