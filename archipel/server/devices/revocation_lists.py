"""Makes the list of revocations that a plan names. With it devices refuse revoked peers by themselves."""

from __future__ import annotations

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from archipel.protocol.messages import MAX_REVOKED, Revocations
from archipel.server.database.tables import Device, RevokedToken


def revocations_of(session: Session, population: str) -> Revocations | None:
    """The revoked devices and tokens of a population, the oldest MAX_REVOKED of each; None if there are none.

    The same rows always give the same list. A full list does not change any more, so no device ever sees an entry
    disappear. Devices that were revoked later are kept out of cohorts by this server alone.
    """
    of_devices = Device.population == population, Device.revoked.is_not(None)
    # The population of a token that was revoked by its key alone is not known, so it is in every list.
    of_tokens = (or_(RevokedToken.population == population, RevokedToken.population.is_(None)),)
    devices = select(Device.device_id).where(*of_devices).order_by(Device.revoked, Device.device_id)
    tokens = select(RevokedToken.token_id).where(*of_tokens).order_by(RevokedToken.revoked, RevokedToken.token_id)
    count = session.scalar(select(func.count()).select_from(Device).where(*of_devices)) or 0
    count += session.scalar(select(func.count()).select_from(RevokedToken).where(*of_tokens)) or 0
    if not count:
        return None
    return Revocations(
        population=population,
        epoch=count,  # a revocation is never undone, so the number only grows
        devices=sorted(session.scalars(devices.limit(MAX_REVOKED))),
        tokens=sorted(session.scalars(tokens.limit(MAX_REVOKED))),
    )
