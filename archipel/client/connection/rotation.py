"""A device replaces its key: from the next key on disk to the server's answer, and from the start if interrupted."""

from __future__ import annotations

from archipel.client.connection.identity import DeviceRecord, IdentityStore
from archipel.client.connection.transport import Transport
from archipel.errors import CertificateError, RefusedError
from archipel.protocol.identity import rotation_request
from archipel.protocol.messages import MAX_ROTATIONS, RotationResponse
from archipel.protocol.sealed import encode

NOT_NOW = {404, 405, 409}
"""The device is in a round, or the server knows no rotations. The old key goes on being its key."""


def rotate(transport: Transport, identity: IdentityStore, record: DeviceRecord) -> DeviceRecord | None:
    """The record with the new key at the end of its chain, None where the server cannot do that now.

    Raises CertificateError when the key was replaced as often as it can be, UnreachableError, or RefusedError.
    """
    if len(record.chain.rotations) >= MAX_ROTATIONS:
        # Before there is a next key, which would never be taken.
        raise CertificateError(f"the key was replaced {MAX_ROTATIONS} times; enrol again with a new token")
    request = rotation_request(record.chain, identity.key(), identity.next_key(), record.server_key)
    try:
        transport.call("PUT", f"/v1/devices/{record.device_id}/key", RotationResponse, body=encode(request))
    except RefusedError as error:
        if error.status in NOT_NOW:
            return None
        raise
    return identity.finish_rotation(record, request.certificate)
