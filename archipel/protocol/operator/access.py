"""Messages about who may do what at a server, and the log of what was done."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages import Digest, Message, Name, RoundId
from archipel.protocol.operator.tasks import MAX_PAGE

AccessRole = Literal["operator", "analyst", "auditor", "admin"]


class TokenRequest(Message, frozen=True, kw_only=True):
    """`populations`: those that the token is for, null: all. `seconds`: how long it is valid, null: for ever.

    Example:
        TokenRequest(name="dashboards", role="auditor")
    """

    name: Name
    role: AccessRole
    populations: Annotated[list[Name], Meta(min_length=1, max_length=1000)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=3_153_600_000)] | None = None


class TokenInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A token's purpose, and the `populations` that it is for (null: all). Times are in Unix seconds, null where it
    does not expire or was not revoked.

    Example:
        for each in client.tokens.list():
            print(each.name, each.role, each.expires or "for ever")
    """

    token_id: RoundId
    name: Name
    role: AccessRole
    populations: list[Name] | None
    created: float
    expires: float | None
    revoked: float | None


class NewToken(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`token` goes into `Authorization: Bearer`; the server keeps its hash only.

    Example:
        made = client.tokens.create(TokenRequest(name="night-watch", role="auditor", seconds=86400))
        auditor = OperatorClient("https://federation.example", made.token)
        client.tokens.revoke(made.info.token_id)
    """

    token: str
    info: TokenInfo

    def __repr__(self) -> str:
        return f"NewToken(token=..., info={self.info!r})"


class TokenPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Newest first; `next` is the `after` of the next page, null on the last."""

    items: list[TokenInfo]
    next: RoundId | None


class AuditEntry(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`actor` is such as "operator:ID", "device:ID" or "coordinator"; `time` in whole microseconds since 1970.
    `subject` is what the `action` was done to.

    `hash` is SHA-256 of the other fields as JSON (keys sorted, no blanks, UTF-8), `previous` that of the entry before.

    Example:
        for entry in client.audit.list():
            print(entry.seq, entry.time / 1e6, entry.actor, entry.action, entry.subject)
    """

    seq: Annotated[int, Meta(ge=1)]
    time: int
    actor: str
    action: str
    subject: str
    detail: dict[str, str | int | float | bool | None]
    previous: Digest
    hash: Digest


class AuditQuery(Message, frozen=True, kw_only=True):
    """At most `limit` entries, from the one that follows number `after`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    after: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0


class AuditPage(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Oldest first; `next` is the `after` of the next page, null on the last."""

    items: list[AuditEntry]
    next: int | None


class AuditHead(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Label "audit"; sealed by the server key. Number and hash of the newest entry, 0 and zeros before the first;
    `time`, in Unix seconds, is when the server signed it.

    Example:
        head = unseal("audit", client.audit.head(), client.server.info().server_key, AuditHead)
        print(head.seq == len(list(client.audit.list())))  # True
    """

    seq: Annotated[int, Meta(ge=0)]
    hash: Digest
    time: float
