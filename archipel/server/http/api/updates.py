"""Receives updates. An update is checked, stored durably, recorded in the database, and acknowledged, in this order.

After a kill between any two steps the device has no acknowledgement and sends the same bytes again. Over a slow link
it sends parts, each of which is stored durably, and then asks with an empty body that they be put together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flask import request
from sqlalchemy import bindparam, select

from archipel.errors import MessageError, RefusalError
from archipel.protocol.messages import MAX_PARTS, PART_BYTES, Receipt, UpdateParts
from archipel.protocol.plain import decode_plain
from archipel.server.database.tables import UPDATE_PHASES, Answer
from archipel.server.http.api.bundles import body_chunks, declared_length
from archipel.server.http.problems import refuse
from archipel.server.http.routes import DEVICE, Call, Route
from archipel.server.rounds.answering import store_answer
from archipel.server.rounds.seats import Seat, find_seat
from archipel.server.services import Services
from archipel.server.storage.received import Written

DIGEST_HEADER = "Digest-SHA256"
_PARTS = "/v1/rounds/<id:round_id>/update/parts"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WANTED = select(Answer.phase).where(
    Answer.of(bindparam("round_id"), bindparam("device_id")),
    Answer.phase.in_(UPDATE_PHASES),
    Answer.digest == bindparam("digest"),
    Answer.folded_into.is_(None),
)


def upload_update(call: Call[None], round_id: str) -> Receipt:
    """Upload the packed masked vector, or in a round with privacy plain the update as safetensors, which is checked.

    Masked bytes of the right length are always valid: every number of that many bits is an entry. An empty body stands
    for the parts that the device has sent before.
    """
    services = call.services
    length = declared_length(services.settings.max_update_bytes)
    digest = _digest()
    # Checked before the body is read: a repeated or refused upload costs no transfer.
    seat = find_seat(services, round_id, call.identity.device_id)
    if not seat.may_send(seat.uploads_in, digest):
        return Receipt()
    if length == 0 and seat.update_bytes:
        chunks = _put_together(services, seat)
    elif length == seat.update_bytes:
        chunks = body_chunks(length)
    else:
        status = 413 if length > seat.update_bytes else 422
        raise refuse(status, f"{length} bytes, an update of this round has {seat.update_bytes}")
    try:
        written = services.spool.receive(round_id, chunks)
        if written.digest != digest:
            written.discard()
            if length == 0:
                services.spool.drop_parts(round_id, seat.device_id)
            raise refuse(422, f"the body's SHA-256 is {written.digest}, header {DIGEST_HEADER} says {digest}")
        if seat.privacy == "plain":
            _check(services, round_id, written)
        name = services.spool.keep(round_id, seat.device_id, written)
    except FileNotFoundError:
        raise refuse(410, "the round is over: its updates were discarded") from None
    try:
        receipt = store_answer(services, seat, seat.uploads_in, digest=digest, size=seat.update_bytes)
        if length == 0:
            services.spool.drop_parts(round_id, seat.device_id)
        return receipt
    except RefusalError:
        # The file is dropped unless a second request with the same bytes was acknowledged meanwhile: both requests
        # stored them under one name.
        if services.database.look(_WANTED, round_id=round_id, device_id=seat.device_id, digest=digest) is None:
            services.spool.drop(round_id, [name])
        raise


def list_parts(call: Call[None], round_id: str) -> UpdateParts:
    """Which parts of the device's update the server has, so that it sends the others alone after an interruption."""
    seat = find_seat(call.services, round_id, call.identity.device_id)
    return UpdateParts(held=call.services.spool.parts(round_id, seat.device_id))


def upload_part(call: Call[None], round_id: str, number: str) -> Receipt:
    """Upload 1 MiB of the update, or what is left for the last part; the first is part 1. It may be sent again.

    The digest is that of the whole update.
    """
    spool, length, digest = call.services.spool, declared_length(PART_BYTES), _digest()
    seat = find_seat(call.services, round_id, call.identity.device_id)
    if not seat.may_send(seat.uploads_in, digest):
        return Receipt()
    if int(number) > MAX_PARTS or not 0 < length == min(PART_BYTES, seat.update_bytes - (int(number) - 1) * PART_BYTES):
        raise refuse(
            422, f"{length} bytes are not part {number} of an update of {seat.update_bytes} in parts of {PART_BYTES}"
        )
    spool.keep_part(round_id, seat.device_id, int(number), body_chunks(length))
    return Receipt()


def _digest() -> str:
    digest = request.headers.get(DIGEST_HEADER, "")
    if not _DIGEST.fullmatch(digest):
        raise refuse(400, f"header {DIGEST_HEADER}: expected the update's SHA-256 in 64 lower-case hexadecimal digits")
    return digest


def _put_together(services: Services, seat: Seat) -> Iterator[bytes]:
    count = -(-seat.update_bytes // PART_BYTES)
    held = set(services.spool.parts(seat.round_id, seat.device_id))
    missing = [number for number in range(1, count + 1) if number not in held]
    if missing:
        raise refuse(422, f"{len(missing)} of {count} parts are missing, the first is {missing[0]}")
    return services.spool.read_parts(seat.round_id, seat.device_id, count)


def _check(services: Services, round_id: str, written: Written) -> None:
    layout = services.frozen.layout(services.database, round_id)
    try:
        decode_plain(written.temporary, layout)
    except MessageError as error:
        written.discard()
        raise refuse(422, str(error)) from None


ROUTES = (
    Route(
        "PUT",
        "/v1/rounds/<id:round_id>/update",
        DEVICE,
        upload_update,
        response=Receipt,
        members=True,
        takes="application/octet-stream",
        headers={DIGEST_HEADER: _DIGEST.pattern},
    ),
    Route("GET", _PARTS, DEVICE, list_parts, response=UpdateParts, members=True),
    Route(
        "PUT",
        f"{_PARTS}/<number:number>",
        DEVICE,
        upload_part,
        response=Receipt,
        members=True,
        takes="application/octet-stream",
        headers={DIGEST_HEADER: _DIGEST.pattern},
    ),
)
