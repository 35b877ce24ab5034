"""X25519 alone: the protocol `neighbours`."""

from __future__ import annotations

from archipel.protocol.secagg import keys
from archipel.protocol.secagg_plus.agreement import Draw, KeyAgreement, Private
from archipel.protocol.secagg_plus.envelope import envelope_key
from archipel.protocol.secagg_plus.member import ALONE_BYTES, RoundKeys


class Alone(KeyAgreement):
    """A secret is an X25519 private key. Either of two finds their mask's key from the other's public one."""

    full_bytes = short_bytes = ALONE_BYTES
    opening_bytes = offer_bytes = told_bytes = 0
    by_draw = False

    def private(self, secret: bytes) -> Private:
        key = keys.private_key(secret)
        return Private(secret, key, key.public_key().public_bytes_raw())

    def publish(self, cipher: Private, mask: Private, seed_digest: bytes) -> RoundKeys:
        return RoundKeys(cipher.public, mask.public, seed_digest)

    def lock(self, cipher: Private, theirs: RoundKeys) -> tuple[bytes, bytes]:
        holder = theirs.cipher_key
        return envelope_key(cipher.x25519, holder, self._salt, cipher.public, holder), b""

    def unlock(self, cipher: Private, theirs: bytes, opening: bytes) -> bytes:
        return envelope_key(cipher.x25519, theirs, self._salt, theirs, cipher.public)

    def offer(self, mask: Private, theirs: RoundKeys, draw: Draw) -> tuple[bytes, bytes]:
        return b"", b""

    def accept(self, mask: Private, told: bytes, draw: Draw) -> bytes:
        return b""

    def recover(self, mask: Private, sent: bytes, draw: Draw, drew: bool) -> bytes:
        return b""

    def mask_key(self, mask: Private, theirs: bytes, part: bytes, draw: Draw, drew: bool) -> bytes:
        return keys.pairwise_mask_key(keys.agree(mask.x25519, theirs), self._salt, mask.public, theirs)

    def is_of(self, mask: Private, public: RoundKeys) -> bool:
        return mask.public == public.mask_key
