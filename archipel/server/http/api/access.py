"""Access tokens of people and scripts. Admins make and revoke them; a token itself is shown only once."""

from __future__ import annotations

import secrets

from archipel.protocol.operator.access import NewToken, TokenInfo, TokenPage, TokenRequest
from archipel.protocol.operator.tasks import PageQuery
from archipel.server.audit import log as audit
from archipel.server.database.server_tables import AccessToken
from archipel.server.http.auth import ACCESS_PREFIX, token_hash
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse
from archipel.server.http.routes import ADMIN, Call, Route


def create_token(call: Call[TokenRequest]) -> NewToken:
    """Make an access token; the answer is the only place where it is ever shown."""
    # A limit would not bind an admin, who can make a token for any population.
    if call.body.role == "admin" and call.body.populations is not None:
        raise refuse(422, "populations: an admin's token is for all of them, for it can make others")
    now = call.services.clock()
    token = ACCESS_PREFIX + secrets.token_urlsafe(32)
    row = AccessToken(
        token_id=secrets.token_hex(16),
        token_hash=token_hash(token),
        name=call.body.name,
        role=call.body.role,
        populations=None if call.body.populations is None else sorted(set(call.body.populations)),
        created=now,
        expires=None if call.body.seconds is None else now + call.body.seconds,
        revoked=None,
    )
    with call.services.database.write() as session:
        session.add(row)
        session.flush()
        audit.append(
            session, now, call.identity.actor, "token.create", row.token_id, name=row.name, role=row.role,
            populations=None if row.populations is None else " ".join(row.populations),
            expires=None if row.expires is None else round(row.expires),
        )  # fmt: skip
    return NewToken(token=token, info=_info(row))


def list_tokens(call: Call[None]) -> TokenPage:
    """Access tokens, newest first: their names, roles and times, never the tokens themselves."""
    with call.services.database.read() as session:
        rows, after = page(
            session, AccessToken, AccessToken.created, AccessToken.token_id, call.query, newest_first=True
        )
    return TokenPage(items=[_info(row) for row in rows], next=after)


def revoke_token(call: Call[None], token_id: str) -> TokenInfo:
    """Revoke an access token now. One that has ended stays as it is."""
    now = call.services.clock()
    with call.services.database.write() as session:
        row = session.get(AccessToken, token_id, with_for_update=True)
        if row is None:
            raise refuse(404, f"no token {token_id}")
        if row.revoked is None:
            row.revoked = now
            session.flush()
            audit.append(session, now, call.identity.actor, "token.revoke", token_id)
        return _info(row)


def _info(row: AccessToken) -> TokenInfo:
    return TokenInfo(
        token_id=row.token_id,
        name=row.name,
        role=row.role,  # type: ignore[arg-type]
        populations=row.populations,
        created=row.created,
        expires=row.expires,
        revoked=row.revoked,
    )


ROUTES = (
    Route("POST", "/v1/tokens", ADMIN, create_token, TokenRequest, NewToken, status=201),
    Route("GET", "/v1/tokens", ADMIN, list_tokens, response=TokenPage, query=PageQuery),
    Route("POST", "/v1/tokens/<id:token_id>/revoke", ADMIN, revoke_token, response=TokenInfo),
)
