"""Updates: checked, spooled durably, then recorded, then acknowledged."""

from __future__ import annotations

import re

from flask import request
from sqlalchemy import bindparam, select

from archipel.errors import ApiError, MessageError
from archipel.protocol.messages import Receipt
from archipel.protocol.plain import decode_plain
from archipel.protocol.vector import Layout
from archipel.server.api.bundles import body_chunks, declared_length
from archipel.server.durable import Written
from archipel.server.models import UPDATE_PHASES, Answer
from archipel.server.problems import refuse
from archipel.server.routes import DEVICE, Call, Route
from archipel.server.seats import find_seat, store_answer
from archipel.server.services import Services

DIGEST_HEADER = "Digest-SHA256"
_DIGEST = re.compile(r"[0-9a-f]{64}")
EARLY_BYTES = 256 << 10
_WANTED = select(Answer.phase).where(
    Answer.of(bindparam("round_id"), bindparam("device_id")),
    Answer.phase.in_(UPDATE_PHASES),
    Answer.digest == bindparam("digest"),
    Answer.folded_into.is_(None),
)


def upload_update(call: Call[None], round_id: str) -> Receipt:
    """The packed masked vector, or in a round with privacy plain the update as safetensors, checked before it counts.

    Any masked bytes of the right length are valid: plans use whole bytes per entry.
    """
    services = call.services
    length = declared_length(services.settings.max_update_bytes)
    digest = request.headers.get(DIGEST_HEADER, "")
    if not _DIGEST.fullmatch(digest):
        raise refuse(400, f"header {DIGEST_HEADER}: expected the body's SHA-256 in 64 lower-case hexadecimal digits")
    device_id, terms = call.identity.device_id, services.frozen.upload_terms(services.database, round_id)
    if length > EARLY_BYTES or length != terms.update_bytes:
        # So that nothing large is sent in vain; for a small one this would take longer than to read it.
        seat = find_seat(services, round_id, device_id)
        if not seat.may_send(terms.phase, digest):
            return Receipt()
        if length != terms.update_bytes:
            status = 413 if length > terms.update_bytes else 422
            raise refuse(status, f"{length} bytes, an update of this round has {terms.update_bytes}")
    try:
        written = services.spool.receive(round_id, body_chunks(length))
        wrong = _wrong(written, digest, terms.layout)
        if wrong:
            written.discard()
            find_seat(services, round_id, device_id)  # who is not in the round is told only that
            raise refuse(422, wrong)
        name = services.spool.keep(round_id, device_id, written)
    except FileNotFoundError:
        find_seat(services, round_id, device_id).may_send(terms.phase, digest)  # it says how the round ended
        raise refuse(410, "the round is over: its updates were discarded") from None
    new: list[bool] = []
    try:
        receipt = store_answer(
            services, round_id, device_id, terms.phase, digest=digest, size=length,
            also=lambda connection: new.append(True),
        )  # fmt: skip
    except ApiError:
        _drop_unless_wanted(services, round_id, device_id, digest, name)
        raise
    if not new:
        _drop_unless_wanted(services, round_id, device_id, digest, name)
    return receipt


def _drop_unless_wanted(services: Services, round_id: str, device_id: str, digest: str, name: str) -> None:
    """What was refused or came again: an update that was acknowledged has this very file, until the sum holds it."""
    if services.database.look(_WANTED, round_id=round_id, device_id=device_id, digest=digest) is None:
        services.spool.drop(round_id, [name])


def _wrong(written: Written, digest: str, layout: Layout | None) -> str:
    """What is wrong with the bytes that arrived; empty where nothing is."""
    if written.digest != digest:
        return f"the body's SHA-256 is {written.digest}, header {DIGEST_HEADER} says {digest}"
    if layout is not None:
        try:
            decode_plain(written.temporary, layout)
        except MessageError as error:
            return str(error)
    return ""


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
)
