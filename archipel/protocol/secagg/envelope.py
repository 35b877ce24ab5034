"""What one participant sends to one other through the server, unreadable to it: two secret shares under AES-256-GCM."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from archipel.errors import ShareError
from archipel.protocol.secagg.shamir import SHARE_BYTES, decode_share

NONCE_BYTES = 12
ENVELOPE_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16


def associated_data(round_id: str, cohort: str, sender: str, recipient: str) -> bytes:
    """Ids and digests are hexadecimal and of fixed length, so nothing can be read in two ways.

    `cohort` makes an envelope unreadable to a peer that was told another U1 than the sender.
    """
    return b"archipel/v1/envelope\0" + bytes.fromhex(round_id + cohort + sender + recipient)


def seal_shares(key: bytes, nonce: bytes, mask_key_share: bytes, seed_share: bytes, associated: bytes) -> bytes:
    """Nonce, ciphertext, tag. `nonce` is 12 random bytes: a pair has one key for both directions."""
    return nonce + AESGCM(key).encrypt(nonce, mask_key_share + seed_share, associated)


def open_shares(key: bytes, ciphertext: bytes, associated: bytes, sender: str) -> tuple[bytes, bytes]:
    """(share of the sender's mask key, share of its self-mask seed). Raises ShareError that names the sender."""
    if len(ciphertext) != ENVELOPE_BYTES:
        raise ShareError(
            f"shares from {sender}: expected {ENVELOPE_BYTES} bytes, got {len(ciphertext)}; leaving the round", [sender]
        )
    nonce, sealed = ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:]
    try:
        plain = AESGCM(key).decrypt(nonce, sealed, associated)
        shares = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        for share in shares:
            decode_share(share)
    except InvalidTag:
        raise ShareError(
            f"shares from {sender}: they do not decrypt; they were tampered with, or it was told another cohort "
            "than this device; leaving the round",
            [sender],
        ) from None
    except ShareError as error:
        raise ShareError(f"shares from {sender}: {error}; leaving the round", [sender]) from None
    return shares
