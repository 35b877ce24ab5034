"""Revokes enrolment tokens before they are used. Tokens are made offline, so the server does not know them by then."""

from __future__ import annotations

from sqlalchemy import select

from archipel.protocol.identity import token_id
from archipel.protocol.messages import TokenCertificate
from archipel.protocol.operator.devices import RevokedTokenInfo, RevokedTokenPage, TokenRevocation
from archipel.protocol.operator.tasks import PageQuery
from archipel.protocol.sealed import unseal
from archipel.server.audit import log as audit
from archipel.server.database.tables import Device, RevokedToken
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse, refusing
from archipel.server.http.routes import OPERATOR, READ, Call, Route


def revoke_enrolment_token(call: Call[TokenRevocation]) -> RevokedTokenInfo:
    """Revoke an enrolment token, so that nobody can enrol with it.

    The server refuses to revoke a token that a device has used; revoke the device instead.
    """
    services = call.services
    token_key, population = _which(call)
    if population is None:
        # The key alone does not tell the token's population.
        call.identity.require_all()
    else:
        call.identity.require(population)
    now = services.clock()
    name = token_id(token_key)
    with services.database.write() as session:
        # Enrolment takes its turn as well. Else a token could be used and revoked at the same moment.
        audit.take_turn(session)
        used = session.scalar(select(Device.device_id).where(Device.token_key == token_key))
        if used is not None:
            raise refuse(409, f"the token was used by device {used}; revoke the device")
        row = session.get(RevokedToken, name)
        if row is None:
            row = RevokedToken(token_id=name, token_key=token_key, population=population, revoked=now)
            session.add(row)
            session.flush()
            audit.append(session, now, call.identity.actor, "enrolment_token.revoke", name, population=population)
        return _info(row)


def list_revoked_enrolment_tokens(call: Call[None]) -> RevokedTokenPage:
    """Enrolment tokens that are refused, newest first."""
    where = call.identity.visible(RevokedToken.population)
    with call.services.database.read() as session:
        rows, after = page(
            session, RevokedToken, RevokedToken.revoked, RevokedToken.token_id, call.query, *where, newest_first=True
        )
    return RevokedTokenPage(items=[_info(row) for row in rows], next=after)


def _which(call: Call[TokenRevocation]) -> tuple[bytes, str | None]:
    """Public key and population of the token in the request."""
    body = call.body
    if body.certificate is not None and body.token_key is None:
        with refusing(422):
            known = unseal("token", body.certificate, call.services.settings.enrolment_public_key, TokenCertificate)
        return known.token_key, known.population
    if body.certificate is None and body.token_key is not None:
        return body.token_key, None
    raise refuse(422, "expected either the token's certificate or its token_key")


def _info(row: RevokedToken) -> RevokedTokenInfo:
    return RevokedTokenInfo(
        token_id=row.token_id, token_key=row.token_key, population=row.population, revoked=row.revoked
    )


ROUTES = (
    Route(
        "POST",
        "/v1/enrolment-tokens/revoke",
        OPERATOR,
        revoke_enrolment_token,
        TokenRevocation,
        RevokedTokenInfo,
    ),
    Route(
        "GET",
        "/v1/enrolment-tokens/revoked",
        READ,
        list_revoked_enrolment_tokens,
        response=RevokedTokenPage,
        query=PageQuery,
    ),
)
