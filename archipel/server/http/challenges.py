"""Nonces that a device signs to open a session. The server stores only those that were used.

    nonce [32 bytes] = MAC [16] | expiry [4, Unix seconds, big-endian] | random [12]

The MAC is HMAC-SHA256 over label, device id, expiry and randomness, cut to 16 bytes, under a key derived from the
server's own key. So every web process can make and check nonces, and nobody else can. Since a challenge stores nothing,
anybody may ask for one in a device's name without any effect on the device. A used nonce stays in the database until it
expires, so that it cannot be used twice.
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
    """Make a nonce for the device, which can be used once, for at least `settings.challenge_seconds`."""
    expires = int(now + settings.challenge_seconds) + 1
    rest = expires.to_bytes(4, "big") + secrets.token_bytes(RANDOM_BYTES)
    return Challenge(nonce=_mac(settings, device_id, rest) + rest, expires=float(expires))


def check_challenge(settings: Settings, device_id: str, nonce: bytes, now: float) -> float:
    """Return when the nonce expires (Unix seconds). Raises ApiError 403 if it is not the server's, not for this device,
    or has expired. Whether it was used is the caller's to check, in its transaction."""
    mac, rest = nonce[:MAC_BYTES], nonce[MAC_BYTES:]
    expires = float(int.from_bytes(rest[:4], "big"))
    # One answer for all reasons, after a comparison in constant time.
    if not hmac.compare_digest(mac, _mac(settings, device_id, rest)) or expires <= now:
        raise refuse(403, NOT_GOOD)
    return expires


NOT_GOOD = "the nonce is unknown, used or expired; ask for a new challenge"


def _mac(settings: Settings, device_id: str, rest: bytes) -> bytes:
    return hmac.digest(settings.challenge_key, _LABEL + device_id.encode() + rest, hashlib.sha256)[:MAC_BYTES]
