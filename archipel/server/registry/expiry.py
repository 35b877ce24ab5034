"""Until when a bundle may be offered, as its publisher signed it: devices refuse it afterwards.

Offers and rounds end then. What devices have goes on predicting, so nothing is taken back because it expired.
"""

from __future__ import annotations

import msgspec

from archipel.protocol.moments import moment


class _Validity(msgspec.Struct):
    """What is wanted of a manifest, which was checked whole when the bundle was published."""

    not_after: int = 0


_decode = msgspec.json.Decoder(_Validity).decode


def expiry(manifest: bytes) -> int:
    """Unix seconds, 0 for a bundle without end."""
    return _decode(manifest).not_after


def has_expired(not_after: int, now: float) -> bool:
    """At the same second as `check_validity` of devices and rounds says it."""
    return bool(not_after) and now > not_after


def why_not_offered(version: int, not_after: int, now: float) -> str:
    """One line for operators; empty while the version is offered."""
    if not has_expired(not_after, now):
        return ""
    return (
        f"the bundle of version {version} expired at {moment(not_after)}: it is offered to no device, and those that "
        "run it go on; promote a version of a newer bundle"
    )
