"""Joining a server: once, or, below one root, at another edge server than before.

A device that moves keeps its key, its journal and what it knows of the root's weights log, so it still takes part in
each round of the root once. The record of the edge that it leaves stays in its folder, for its return.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from archipel.client.config import AgentConfig
from archipel.client.connection.identity import DeviceRecord, IdentityStore
from archipel.client.connection.transport import Transport
from archipel.errors import ClientError
from archipel.protocol.identity import EnrolmentToken, enrolment_request, read_chain
from archipel.protocol.messages import EnrolmentResponse
from archipel.protocol.sealed import encode


def is_here(record: DeviceRecord, token: EnrolmentToken) -> bool:
    """Whether the token is for the server and population that the device is a member of."""
    return (record.server_key, record.population) == (token.server_key, token.population)


def join(
    token: EnrolmentToken,
    record: DeviceRecord | None,
    identity: IdentityStore,
    config: AgentConfig,
    pause: Callable[[float], None],
    *,
    busy: bool,
) -> DeviceRecord:
    """Enrol with the token, and replace the record. `busy`: the device is in a round. Raises as Agent.enrol does."""
    server = config.server or token.server
    if record is not None:
        _check_move(record, token, config, busy=busy, rotating=identity.rotating)
        identity.keep_record(record)
        before = identity.kept_record(token)
        if before is not None:
            return identity.go_back(before)
    request = enrolment_request(token, identity.key())
    transport = Transport(server, config, pause)
    try:
        answer = transport.call("POST", "/v1/devices", EnrolmentResponse, body=encode(request))
    finally:
        transport.close()
    device_id, _ = read_chain(request.chain)
    if answer.device_id != device_id:
        raise ClientError(f"enrolment: the server answered for device {answer.device_id}, this is {device_id}")
    if record is not None:
        # Whoever runs the next edge adds no publisher to those that the owner has agreed to.
        keys = [key for key in token.publisher_keys if key in record.publisher_keys]
        token = msgspec.structs.replace(token, publisher_keys=keys)
    return identity.record_enrolment(token, request.chain, server)


def _check_move(
    record: DeviceRecord, token: EnrolmentToken, config: AgentConfig, *, busy: bool, rotating: bool
) -> None:
    here = f"{config.folder}: enrolled already, in population {record.population!r} at {record.server}"
    if record.root is None or record.root != token.root:
        raise ClientError(f"{here}; use another folder")
    if config.server:
        raise ClientError(f"{here}; to move to another edge server, remove the setting server")
    if busy or rotating:
        raise ClientError(f"{here}; it can move to another edge server when its round, or change of keys, is over")
    if not set(record.publisher_keys) & set(token.publisher_keys):
        raise ClientError(f"{here}; the token for {token.server} names none of the publishers of this device")
