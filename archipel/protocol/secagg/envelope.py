"""Envelopes: two secret shares from one participant to another under AES-256-GCM, which the server cannot read.

The sender signs the envelope. So an envelope that does not open is its sender's fault: the server cannot have made it.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from archipel.errors import CertificateError, ShareError
from archipel.protocol.secagg.shamir import SHARE_BYTES, decode_share

NONCE_BYTES = 12
# 16 bytes for the tag of AES-GCM.
ENVELOPE_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16


def associated_data(round_id: str, cohort: str, sender: str, recipient: str) -> bytes:
    """The bytes that an envelope is bound to. `cohort` is the digest of U1.

    A recipient to which the server showed another U1 than to the sender cannot open the envelope. Ids and digests are
    hexadecimal and of fixed length, so no two sets of arguments give the same bytes.
    """
    return b"archipel/v1/envelope\0" + bytes.fromhex(round_id + cohort + sender + recipient)


def seal_shares(key: bytes, nonce: bytes, mask_key_share: bytes, seed_share: bytes, associated: bytes) -> bytes:
    """Nonce, ciphertext, tag. `nonce` is 12 random bytes; `key` has 32 and serves one sender and one recipient."""
    return nonce + AESGCM(key).encrypt(nonce, mask_key_share + seed_share, associated)


def open_shares(key: bytes, ciphertext: bytes, associated: bytes, sender: str) -> tuple[bytes, bytes]:
    """(share of the sender's mask key, share of its self-mask seed). Raises ShareError that names the sender."""
    if len(ciphertext) != ENVELOPE_BYTES:
        raise ShareError(f"shares from {sender}: expected {ENVELOPE_BYTES} bytes, got {len(ciphertext)}", [sender])
    nonce, sealed = ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:]
    try:
        plain = AESGCM(key).decrypt(nonce, sealed, associated)
        shares = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        for share in shares:
            decode_share(share)
    except InvalidTag:
        raise ShareError(f"shares from {sender}: they do not decrypt", [sender]) from None
    except ShareError as error:
        raise ShareError(f"shares from {sender}: {error}", [sender]) from None
    return shares


def sign_envelope(identity: Ed25519PrivateKey, ciphertext: bytes, associated: bytes) -> bytes:
    """The Ed25519 signature, 64 bytes, over the associated data, which has a fixed length, and the ciphertext."""
    return identity.sign(associated + ciphertext)


def check_signature(device_key: bytes, signature: bytes, ciphertext: bytes, associated: bytes, sender: str) -> None:
    """Raises CertificateError, which blames nobody: the server can garble what the sender signed."""
    try:
        Ed25519PublicKey.from_public_bytes(device_key).verify(signature, associated + ciphertext)
    except (InvalidSignature, ValueError):
        raise CertificateError(
            f"shares from {sender}: the signature does not verify; the shares were tampered with on the way, or the "
            "server showed the sender another cohort"
        ) from None
