"""AES-256-GCM for any number of messages with random nonces: XAES-256-GCM (C2SP, c2sp.org/XAES-256-GCM).

AES-GCM with random 96-bit nonces is limited to 2**32 messages for each key (NIST SP 800-38D, section 8.3). Counters as
nonces would repeat after somebody restores a store's files from a backup. So every message has an AES-256-GCM key of
its own, derived (SP 800-108 in counter mode with CMAC) from the key and the first half of a random 192-bit nonce:
after 2**80 messages two nonces collide with probability 2**-32.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

KEY_BYTES = 32
NONCE_BYTES = 24
OVERHEAD_BYTES = NONCE_BYTES + 16
"""The bytes that sealing adds to a message: nonce and tag."""

_BLOCK = 16
_ONES = (1 << 128) - 1


class Sealer:
    """Seals and opens messages under one key of 32 bytes. Not for several threads at once."""

    def __init__(self, key: bytes) -> None:
        # ECB here is AES itself, one block at a time, as CMAC needs it.
        self._aes = Cipher(AES(key), ECB()).encryptor()
        # CMAC's first subkey (NIST SP 800-38B, section 6.1): AES of zeros, doubled in GF(2**128) (polynomial 0x87).
        first = int.from_bytes(self._aes.update(bytes(_BLOCK)), "big")
        subkey = first << 1 & _ONES ^ (0x87 if first >> 127 else 0)
        # The two CMAC inputs are one block each and differ in the counter; the nonce's half is xored in later, into the
        # last 12 bytes, which are zero here. So each key derivation costs two AES blocks.
        blocks = b"".join(b"\0" + bytes([counter]) + b"X\0" + bytes(12) for counter in (1, 2))
        self._masked = int.from_bytes(blocks, "big") ^ (subkey << 128 | subkey)

    def seal(self, nonce: bytes, message: bytes | memoryview, associated: bytes) -> bytes:
        """Returns `nonce` (24 bytes, never used twice with this key), the encrypted message, and the tag (16 bytes)."""
        return nonce + AESGCM(self._derive(nonce)).encrypt(nonce[12:], message, associated)

    def open(self, sealed: bytes, associated: bytes) -> bytes:
        """Inverse of `seal`. The tag is compared in constant time. Raises cryptography.exceptions.InvalidTag."""
        if len(sealed) < OVERHEAD_BYTES:
            raise InvalidTag
        cipher = AESGCM(self._derive(sealed[:NONCE_BYTES]))
        return cipher.decrypt(sealed[12:NONCE_BYTES], memoryview(sealed)[NONCE_BYTES:], associated)

    def _derive(self, nonce: bytes) -> bytes:
        half = int.from_bytes(nonce[:12], "big")
        return self._aes.update((self._masked ^ (half << 128 | half)).to_bytes(2 * _BLOCK, "big"))
