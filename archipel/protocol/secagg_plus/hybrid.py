"""X25519 and ML-KEM-768 together: the protocol `neighbours-mlkem` (docs/protocol-mlkem.md).

A key holds while one of the two does. All keys follow from a device's secrets, so that who holds shares of its mask
secret can help to take off its masks, whichever of the two of a mask left.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from archipel.errors import ShareError
from archipel.protocol.secagg import keys
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.agreement import Draw, KeyAgreement, Private
from archipel.protocol.secagg_plus.member import FULL_BYTES, SHORT_BYTES, RoundKeys

COMMITMENT_BYTES = 16
LEFT_BEHIND_BYTES = kem.KEY_BYTES + 16
_TOLD_BYTES = kem.CIPHERTEXT_BYTES + COMMITMENT_BYTES
# A key seals one K only: it is derived from K's ciphertext, too.
_NONCE = bytes(12)


class Hybrid(KeyAgreement):
    """A secret is what both private keys are derived from: who finds the one of X25519 has nothing of ML-KEM's."""

    full_bytes, short_bytes = FULL_BYTES, SHORT_BYTES
    opening_bytes = kem.CIPHERTEXT_BYTES
    told_bytes, offer_bytes = _TOLD_BYTES, _TOLD_BYTES + LEFT_BEHIND_BYTES
    by_draw = True

    def private(self, secret: bytes) -> Private:
        key = keys.private_key(self._derive(secret, b"x25519"))
        seed = self._derive(secret, b"ml-kem-768", length=kem.SEED_BYTES)
        return Private(secret, key, key.public_key().public_bytes_raw(), kem.private_key(seed))

    def publish(self, cipher: Private, mask: Private, seed_digest: bytes) -> RoundKeys:
        return RoundKeys(
            cipher.public, mask.public, seed_digest, kem.public_key(cipher.kem), kem.public_key(mask.kem)
        )  # fmt: skip

    def lock(self, cipher: Private, theirs: RoundKeys) -> tuple[bytes, bytes]:
        shared, ciphertext = kem.encapsulate(theirs.cipher_kem)
        holder = theirs.cipher_key
        agreed = keys.agree(cipher.x25519, holder)
        return self._envelope_key(agreed, shared, cipher.public, holder, ciphertext), ciphertext

    def unlock(self, cipher: Private, theirs: bytes, opening: bytes) -> bytes:
        agreed, shared = keys.agree(cipher.x25519, theirs), kem.decapsulate(cipher.kem, opening)
        return self._envelope_key(agreed, shared, theirs, cipher.public, opening)

    def offer(self, mask: Private, theirs: RoundKeys, draw: Draw) -> tuple[bytes, bytes]:
        shared, ciphertext = kem.encapsulate(theirs.mask_kem)
        commitment, part = self._divide(shared, ciphertext, draw)
        left_behind = AESGCM(self._wrapping_key(mask, draw, ciphertext)).encrypt(_NONCE, shared, None)
        return part, ciphertext + commitment + left_behind

    def accept(self, mask: Private, told: bytes, draw: Draw) -> bytes:
        return self._open(kem.decapsulate(mask.kem, told[: kem.CIPHERTEXT_BYTES]), told, draw)

    def recover(self, mask: Private, sent: bytes, draw: Draw, drew: bool) -> bytes:
        told, left_behind = sent[:_TOLD_BYTES], sent[_TOLD_BYTES:]
        if not drew:
            return self.accept(mask, told, draw)
        try:
            key = self._wrapping_key(mask, draw, told[: kem.CIPHERTEXT_BYTES])
            shared = AESGCM(key).decrypt(_NONCE, left_behind, None)
        except InvalidTag:
            raise ShareError(
                f"mask of places {draw.drawer} and {draw.drawn}: what was left behind does not open"
            ) from None
        return self._open(shared, told, draw)

    def mask_key(self, mask: Private, theirs: bytes, part: bytes, draw: Draw, drew: bool) -> bytes:
        agreed = keys.agree(mask.x25519, theirs)
        both = (mask.public, theirs) if drew else (theirs, mask.public)
        return self._derive(agreed + part, b"pair-mask", bytes(draw), *both)

    def is_of(self, mask: Private, public: RoundKeys) -> bool:
        # Both: with another ML-KEM key what was sent to the device could not be opened, and nobody would be to blame.
        return (mask.public, kem.public_key(mask.kem)) == (public.mask_key, public.mask_kem)

    def _envelope_key(self, agreed: bytes, shared: bytes, dealer: bytes, holder: bytes, ciphertext: bytes) -> bytes:
        return self._derive(agreed + shared, b"envelope", dealer, holder, ciphertext)

    def _open(self, shared: bytes, told: bytes, draw: Draw) -> bytes:
        ciphertext, committed = told[: kem.CIPHERTEXT_BYTES], told[kem.CIPHERTEXT_BYTES :]
        commitment, part = self._divide(shared, ciphertext, draw)
        if not hmac.compare_digest(commitment, committed):
            raise ShareError(f"mask of places {draw.drawer} and {draw.drawn}: the commitment is to another key")
        return part

    def _divide(self, shared: bytes, ciphertext: bytes, draw: Draw) -> tuple[bytes, bytes]:
        """The commitment to K, and the part of the mask's key."""
        length = COMMITMENT_BYTES + keys.KEY_BYTES
        both = self._derive(shared, b"pair", bytes(draw), ciphertext, length=length)
        return both[:COMMITMENT_BYTES], both[COMMITMENT_BYTES:]

    def _wrapping_key(self, mask: Private, draw: Draw, ciphertext: bytes) -> bytes:
        # With the ciphertext: a device whose disk was put back, and which deals anew, has another key for another K.
        return self._derive(mask.secret, b"left-behind", bytes(draw), ciphertext)

    def _derive(self, secret: bytes, label: bytes, *named: bytes, length: int = keys.KEY_BYTES) -> bytes:
        info = b"archipel/v3/" + label + b"\0" + b"".join(named)
        return HKDF(algorithm=SHA256(), length=length, salt=self._salt, info=info).derive(secret)
