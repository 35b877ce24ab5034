"""The list of revocations that a plan names, so that peers refuse who was revoked without the server's help."""

from __future__ import annotations

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from archipel.protocol.messages import MAX_REVOKED, Revocations
from archipel.server.database.tables import Device, RevokedToken


def revocations_of(session: Session, population: str) -> Revocations | None:
    """Who was revoked, the oldest MAX_REVOKED of each kind; None where nobody was. The same rows give the same list.

    A full list stays as it is, so that no device ever sees an entry go: from whom was revoked later this server alone
    keeps its cohorts.
    """
    of_devices = Device.population == population, Device.revoked.is_not(None)
    # Of a token that is known by its key alone it is not known whose it is.
    of_tokens = (or_(RevokedToken.population == population, RevokedToken.population.is_(None)),)
    devices = select(Device.device_id).where(*of_devices).order_by(Device.revoked, Device.device_id)
    tokens = select(RevokedToken.token_id).where(*of_tokens).order_by(RevokedToken.revoked, RevokedToken.token_id)
    count = session.scalar(select(func.count()).select_from(Device).where(*of_devices)) or 0
    count += session.scalar(select(func.count()).select_from(RevokedToken).where(*of_tokens)) or 0
    if not count:
        return None
    return Revocations(
        population=population,
        epoch=count,  # nothing that was revoked is ever taken back
        devices=sorted(session.scalars(devices.limit(MAX_REVOKED))),
        tokens=sorted(session.scalars(tokens.limit(MAX_REVOKED))),
    )
