"""Devices enrol once, with a one-time token."""

from __future__ import annotations

from sqlalchemy import or_, select

from archipel.protocol.identity import token_id, verify_chain, verify_enrolment
from archipel.protocol.messages import EnrolmentRequest, EnrolmentResponse
from archipel.protocol.sealed import encode
from archipel.server.audit import log as audit
from archipel.server.database.tables import Device, DeviceKey, RevokedToken
from archipel.server.devices.revocation import require_active
from archipel.server.http.problems import refuse, refusing
from archipel.server.http.routes import PUBLIC, Call, Route


def enrol(call: Call[EnrolmentRequest]) -> EnrolmentResponse:
    """Register a device by its chain; the same device may ask again, a used token serves nobody else."""
    settings = call.services.settings
    now = call.services.clock()
    with refusing(403):
        claimed = verify_chain(call.body.chain, settings.enrolment_public_key)
    known = select(Device).where(or_(Device.token_key == claimed.token_key, Device.device_id == claimed.device_id))
    with call.services.database.read() as session:
        devices = list(session.scalars(known))
    # A device that lost the answer asks again, when the token may have expired. It has served its purpose, so the time
    # does not count then (`now=0.0`).
    again = any((d.token_key, d.device_key) == (claimed.token_key, claimed.device_key) for d in devices)
    with refusing(403):
        device = verify_enrolment(
            call.body, settings.enrolment_public_key, settings.public_key, now=0.0 if again else now
        )
    with call.services.database.write() as session:
        # Taken before anything is read, so that a token cannot be used and revoked at the same moment: revocation
        # takes its turn as well.
        audit.take_turn(session)
        if session.get(RevokedToken, token_id(device.token_key)) is not None:
            raise refuse(403, "this enrolment token was revoked; ask for a new one")
        for other in session.scalars(known):
            if other.token_key == device.token_key:
                require_active(other.device_id, other.revoked)
            if (other.token_key, other.device_key) == (device.token_key, device.device_key):
                return EnrolmentResponse(device_id=device.device_id)
            if other.token_key == device.token_key:
                raise refuse(409, "this enrolment token was used by another device; ask for a new one")
            raise refuse(409, f"device {device.device_id} is enrolled already, with another token")
        if session.get(DeviceKey, device.device_key) is not None:
            raise refuse(409, "this key was the key of another device; make a new one")
        session.add(
            Device(
                device_id=device.device_id,
                device_key=device.device_key,
                token_key=device.token_key,
                population=device.population,
                kind=device.kind,
                chain=encode(call.body.chain),
                enrolled=now,
            )
        )
        session.flush()
        session.add(DeviceKey(device_key=device.device_key, device_id=device.device_id, since=now))
        audit.append(session, now, f"device:{device.device_id}", "device.enrol", device.device_id,
                     population=device.population, kind=device.kind)  # fmt: skip
    return EnrolmentResponse(device_id=device.device_id)


ROUTES = (Route("POST", "/v1/devices", PUBLIC, enrol, EnrolmentRequest, EnrolmentResponse),)
