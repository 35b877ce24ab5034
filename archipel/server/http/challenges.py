"""Nonces that a device signs for a session, of which the server remembers only those that were used.

    nonce [32 bytes] = MAC [16] | expiry [4, Unix seconds, big-endian] | random [12]

The MAC is HMAC-SHA256 over label, device id, expiry and randomness, cut to 16 bytes, under a key derived from the
server's own: every web process makes and knows them, and nobody else does. So asking for challenges in a device's name
changes nothing for the device. A nonce that was used is kept in the database until it expires.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from archipel.protocol.messages import Challenge
from archipel.server.http.problems import refuse
from archipel.server.settings import Settings

MAC_BYTES, RANDOM_BYTES = 16, 12
_LABEL = b"archipel/v1/challenge\0"


def make_challenge(settings: Settings, device_id: str, now: float) -> Challenge:
    """A nonce for that device, good once, for at least `settings.challenge_seconds`."""
    expires = int(now + settings.challenge_seconds) + 1
    rest = expires.to_bytes(4, "big") + secrets.token_bytes(RANDOM_BYTES)
    return Challenge(nonce=_mac(settings, device_id, rest) + rest, expires=float(expires))


def check_challenge(settings: Settings, device_id: str, nonce: bytes, now: float) -> float:
    """When the nonce expires. Raises ApiError 403 for one that was not made for the device here, or has expired."""
    mac, rest = nonce[:MAC_BYTES], nonce[MAC_BYTES:]
    expires = float(int.from_bytes(rest[:4], "big"))
    if not hmac.compare_digest(mac, _mac(settings, device_id, rest)) or expires <= now:
        raise refuse(403, NOT_GOOD)
    return expires


NOT_GOOD = "the nonce is unknown, used or expired; ask for a new challenge"


def _mac(settings: Settings, device_id: str, rest: bytes) -> bytes:
    return hmac.digest(settings.challenge_key, _LABEL + device_id.encode() + rest, hashlib.sha256)[:MAC_BYTES]
