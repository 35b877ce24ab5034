"""A holder's signed word that it takes a dealer as present, and so will never show a share of the dealer's mask key."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from archipel.errors import CertificateError


def inclusion(bound: bytes, dealer: int, holder: int) -> bytes:
    """The bytes that the holder signs; `bound` names the session, the others are places in its cohort."""
    return b"archipel/v2/included\0" + bound + dealer.to_bytes(4, "big") + holder.to_bytes(4, "big")


def check_inclusion(device_key: bytes, signature: bytes, bound: bytes, dealer: int, holder: int) -> None:
    """Raises CertificateError unless the holder, whose raw 32-byte key is `device_key`, has signed it."""
    try:
        Ed25519PublicKey.from_public_bytes(device_key).verify(signature, inclusion(bound, dealer, holder))
    except (InvalidSignature, ValueError):
        raise CertificateError(f"inclusion: not signed by the device at place {holder}") from None
