"""Ending what a device may do. What it had sent before stays as it is.

In the transaction that revokes a device its sessions go, and it is never due again, so no round takes
it. Every transaction that stores something in its name asks `require_active`. A round that it is in goes on as if the
device had dropped out at that moment: an update that was acknowledged stays in the sum, for once the survivors are
settled their peers have signed, or are about to sign, that set, and refuse any other.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Row, delete, update
from sqlalchemy.orm import Session

from archipel.errors import ForbiddenError, NotFoundError
from archipel.server.database.tables import CheckInRow, Device, DeviceSession

D = TypeVar("D", bound=Device | Row[Any, Any, Any])

LOCKED: dict[str, Any] = {"key_share": True}
"""`with_for_update` for a device whose key or state changes: on PostgreSQL FOR NO KEY UPDATE, for which a round that
takes the device at the same moment need not wait."""
SHARED: dict[str, Any] = {"read": True}
"""`with_for_update` for what must not happen to a device that is being revoked at the same moment."""


def require_active(device_id: str, revoked: float | None) -> None:
    """Raises ForbiddenError for a device that was revoked."""
    if revoked is not None:
        raise ForbiddenError(f"device {device_id} was revoked; to take part again it needs a new enrolment token")


def require_member(device: D | None, device_id: str) -> D:
    """`device` itself, which has `revoked`.

    Raises NotFoundError where there is none, ForbiddenError where it was revoked.
    """
    if device is None:
        raise NotFoundError(f"device {device_id} is not enrolled")
    require_active(device_id, device.revoked)
    return device


def revoke(session: Session, device: Device, now: float) -> None:
    """Revoke `device`, which the transaction has `LOCKED`."""
    device.revoked = now
    end_sessions(session, device.device_id)
    # What it told was for being taken into rounds and offered versions; nobody needs it any more.
    told = update(CheckInRow).where(CheckInRow.device_id == device.device_id)
    session.execute(told.values(due=0.0, attributes={}, versions=None))


def end_sessions(session: Session, device_id: str) -> None:
    """Sessions of a device are worth nothing from now on."""
    session.execute(delete(DeviceSession).where(DeviceSession.device_id == device_id))
