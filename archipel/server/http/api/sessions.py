"""A device proves that it holds its key by signing a fresh nonce, and gets a short-lived token."""

from __future__ import annotations

import secrets

from flask import request
from sqlalchemy import delete

from archipel.protocol.messages import Challenge, ChallengeRequest, SessionProof, SessionRequest, SessionResponse
from archipel.protocol.sealed import unseal
from archipel.server.database.tables import Device, DeviceSession, UsedNonce
from archipel.server.devices.revocation import SHARED, require_member
from archipel.server.http.auth import token_hash
from archipel.server.http.challenges import NOT_GOOD, check_challenge, make_challenge
from archipel.server.http.problems import refuse, refusing
from archipel.server.http.routes import PUBLIC, Call, Route


def challenge(call: Call[ChallengeRequest]) -> Challenge:
    """A nonce for the device to sign. It can be used once, and expires after a minute."""
    now = call.services.clock()
    device_id = call.body.device_id
    with call.services.database.read() as session:
        require_member(session.get(Device, device_id), device_id)
    # Nothing is stored, because anybody may ask in a device's name.
    return make_challenge(call.services.settings, device_id, now)


def open_session(call: Call[SessionRequest]) -> SessionResponse:
    """A bearer token for the signed nonce."""
    services = call.services
    now = services.clock()
    device_id = call.body.device_id
    with services.database.read() as session:
        device = require_member(session.get(Device, device_id), device_id)
    with refusing(403):
        proof = unseal("session", call.body.proof, device.device_key, SessionProof)
    if proof.server_key != services.settings.public_key:
        raise refuse(403, "the proof was made for another server")
    good_until = check_challenge(services.settings, device_id, proof.nonce, now)
    token = secrets.token_urlsafe(32)
    expires = now + services.settings.session_seconds
    with services.database.write() as session:
        # The device may have been revoked or have replaced its key since the proof was verified.
        known = require_member(session.get(Device, device_id, with_for_update=SHARED), device_id)
        if known.device_key != device.device_key:
            raise refuse(403, "the proof was made with a key that the device has replaced")
        if session.get(UsedNonce, proof.nonce) is not None:
            raise refuse(403, NOT_GOOD)
        # Of two requests with one nonce at the same moment, the primary key of this row lets one through.
        session.add(UsedNonce(nonce=proof.nonce, expires=good_until))
        session.flush()
        session.execute(delete(DeviceSession).where(DeviceSession.device_id == device_id, DeviceSession.expires <= now))
        session.add(DeviceSession(token_hash=token_hash(token), device_id=device_id, expires=expires))
    request.environ["archipel.device"] = device_id
    services.tally.count("session.open", f"device:{device_id}", now)
    return SessionResponse(token=token, expires=expires)


ROUTES = (
    Route("POST", "/v1/challenges", PUBLIC, challenge, ChallengeRequest, Challenge),
    Route("POST", "/v1/sessions", PUBLIC, open_session, SessionRequest, SessionResponse),
)
