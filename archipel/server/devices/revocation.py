"""Revokes devices. What a device sent before it was revoked stays.

The transaction that revokes a device deletes its sessions and sets its check-in so that it is never due again, so no
round takes it. Every transaction that stores something in a device's name calls `require_active`. A round that the
device is in goes on as if it had dropped out at that moment. An update that was acknowledged stays in the sum: once the
survivors are settled, their peers sign that set and refuse any other.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Row, delete, update
from sqlalchemy.orm import Session

from archipel.errors import ForbiddenError, NotFoundError
from archipel.server.database.tables import CheckInRow, Device, DeviceSession

D = TypeVar("D", bound=Device | Row[Any, Any, Any])

LOCKED: dict[str, Any] = {"key_share": True}
"""`with_for_update` for a device whose key or state changes. On PostgreSQL it is FOR NO KEY UPDATE, so a round that
takes the device at the same moment, which refers to its row, need not wait."""
SHARED: dict[str, Any] = {"read": True}
"""`with_for_update` for work that must not run while the device is being revoked."""


def require_active(device_id: str, revoked: float | None) -> None:
    """Raise ForbiddenError if the device was `revoked` (Unix seconds; None: it was not)."""
    if revoked is not None:
        raise ForbiddenError(f"device {device_id} was revoked; to take part again it needs a new enrolment token")


def require_member(device: D | None, device_id: str) -> D:
    """Return `device`, a row that has `revoked`.

    Raises NotFoundError if it is None, ForbiddenError if the device was revoked.
    """
    if device is None:
        raise NotFoundError(f"device {device_id} is not enrolled")
    require_active(device_id, device.revoked)
    return device


def revoke(session: Session, device: Device, now: float) -> None:
    """Revoke `device`, which the transaction has `LOCKED`."""
    device.revoked = now
    end_sessions(session, device.device_id)
    # The device's attributes and versions served to choose rounds and offers, and are not needed any more.
    check_in = update(CheckInRow).where(CheckInRow.device_id == device.device_id)
    session.execute(check_in.values(due=0.0, attributes={}, versions=None))


def end_sessions(session: Session, device_id: str) -> None:
    """Delete all sessions of a device, so that its bearer tokens are refused."""
    session.execute(delete(DeviceSession).where(DeviceSession.device_id == device_id))
