"""The time until which a bundle may be offered, as its publisher signed it. Devices refuse it afterwards.

Offers and rounds end then. Devices go on predicting with the bundle they have, so an expired version is not replaced by
an earlier one.
"""

from __future__ import annotations

import msgspec

from archipel.protocol.moments import moment


class _Validity(msgspec.Struct):
    """The one field that is read of a manifest. The whole manifest was checked when the bundle was uploaded."""

    not_after: int = 0


_decode = msgspec.json.Decoder(_Validity).decode


def expiry(manifest: bytes) -> int:
    """When the bundle of this manifest expires: Unix seconds, 0 if never."""
    return _decode(manifest).not_after


def has_expired(not_after: int, now: float) -> bool:
    """Whether a bundle has expired, by the same comparison as `check_validity` on devices and for rounds."""
    return bool(not_after) and now > not_after


def why_not_offered(version: int, not_after: int, now: float) -> str:
    """One line for operators; empty while the version is offered."""
    if not has_expired(not_after, now):
        return ""
    return (
        f"the bundle of version {version} expired at {moment(not_after)}: it is offered to no device, and those that "
        "run it go on; promote a version of a newer bundle"
    )
