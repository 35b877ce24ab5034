"""A device replaces its key. Both keys sign the request, so it needs no session and may be repeated."""

from __future__ import annotations

from archipel.protocol.identity import verify_rotation
from archipel.protocol.messages import Chain, RotationRequest, RotationResponse
from archipel.protocol.sealed import decode, encode
from archipel.server.audit import log as audit
from archipel.server.database.tables import CheckInRow, Device, DeviceKey
from archipel.server.devices.revocation import LOCKED, end_sessions, require_member
from archipel.server.http.problems import refuse, refusing
from archipel.server.http.routes import PUBLIC, Call, Route


def replace_key(call: Call[RotationRequest], device_id: str) -> RotationResponse:
    """Replace a device's key: from now on the server accepts only the new one.

    It refuses this while the device is in a round.
    """
    services, settings = call.services, call.services.settings
    now = services.clock()
    with services.database.read() as session:
        device = require_member(session.get(Device, device_id), device_id)
    chain = decode("chain", device.chain, Chain)
    with refusing(403):
        extended, new = verify_rotation(call.body, chain, settings.enrolment_public_key, settings.public_key)
    answer = RotationResponse(device_id=device_id, rotations=new.rotations)
    if new.device_key == device.device_key:
        # The device has lost the answer to an earlier request.
        return answer
    if new.rotations != len(chain.rotations) + 1:
        raise refuse(403, "the key was replaced already, by another one")
    with services.database.write() as session:
        known = require_member(session.get(Device, device_id, with_for_update=LOCKED), device_id)
        if known.device_key != device.device_key:
            raise refuse(409, "the key is being replaced at this moment; ask again")
        seen = session.get(CheckInRow, device_id, with_for_update=True)
        if seen is not None and seen.round_id is not None:
            # The round's members verify the device's signatures with the key that it has now.
            raise refuse(409, "the device is in a round; ask again when that is over")
        if session.get(DeviceKey, new.device_key) is not None:
            raise refuse(409, "this key was a device's key before; make a new one")
        session.add(DeviceKey(device_key=new.device_key, device_id=device_id, since=now))
        known.device_key, known.chain = new.device_key, encode(extended)
        # Whoever has stolen the old key must not keep a session that it opened.
        end_sessions(session, device_id)
        session.flush()
        audit.append(session, now, f"device:{device_id}", "device.rotate", device_id, number=new.rotations)
    services.sessions.forget(device_id)
    return answer


ROUTES = (Route("PUT", "/v1/devices/<id:device_id>/key", PUBLIC, replace_key, RotationRequest, RotationResponse),)
