"""A device's key rotation, from the next key on disk to the server's answer; after a kill it starts again."""

from __future__ import annotations

from archipel.client.connection.identity import DeviceRecord, IdentityStore
from archipel.client.connection.transport import Transport
from archipel.errors import CertificateError, RefusedError
from archipel.protocol.identity import rotation_request
from archipel.protocol.messages import MAX_ROTATIONS, RotationResponse
from archipel.protocol.sealed import encode

NOT_NOW = {404, 405, 409}
"""The device is in a round, or the server does not support rotations. The old key stays valid."""


def rotate(transport: Transport, identity: IdentityStore, record: DeviceRecord) -> DeviceRecord | None:
    """Replace the device's key; returns the changed record, or None if the server cannot do that now.

    A request with the same next key may be sent any number of times. Raises CertificateError if the key was replaced as
    often as is allowed, UnreachableError, or RefusedError.
    """
    if len(record.chain.rotations) >= MAX_ROTATIONS:
        # Before `next_key` makes a key that the server would never take.
        raise CertificateError(f"the key was replaced {MAX_ROTATIONS} times; enrol again with a new token")
    request = rotation_request(record.chain, identity.key(), identity.next_key(), record.server_key)
    try:
        transport.call("PUT", f"/v1/devices/{record.device_id}/key", RotationResponse, body=encode(request))
    except RefusedError as error:
        if error.status in NOT_NOW:
            return None
        raise
    return identity.finish_rotation(record, request.certificate)
