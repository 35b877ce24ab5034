"""The meaning of the HTTP statuses of errors, for the server, which answers with them, and for its clients.

`archipel.server.http.problems` has the server's exceptions and their statuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from archipel.protocol.messages import FieldProblem, Problem

KINDS: Mapping[int, str] = MappingProxyType(
    {
        400: "bad_request",
        401: "unauthorized",
        403: "forbidden",
        404: "not_found",
        405: "unsupported",
        406: "unsupported",
        409: "conflict",
        410: "gone",
        411: "length_required",
        413: "too_large",
        414: "too_large",
        415: "unsupported",
        416: "unprocessable",
        422: "unprocessable",
        429: "rate_limited",
        431: "too_large",
        500: "internal",
        503: "unavailable",
    }
)
"""The kind of an error, by status."""

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "bad_request": "the request is not well formed",
        "unauthorized": "the request has no valid token",
        "forbidden": "the token's owner may not do this",
        "not_found": "there is nothing at this path",
        "unsupported": "the method or the format is not supported here",
        "conflict": "the state of things does not allow it now",
        "gone": "it was there and is over",
        "length_required": "the request does not say how long its body is",
        "too_large": "the request is too large",
        "unprocessable": "the request is well formed, and what it asks for is not possible",
        "rate_limited": "too many requests",
        "internal": "the server made an error",
        "unavailable": "the server cannot answer now",
    }
)
"""What each kind means, in the error shape's `title`."""

TYPE = "urn:archipel:problem:"
"""Before the kind, in the error shape's `type`."""
CONTENT_TYPE = "application/problem+json"
"""The media type of RFC 9457."""

TELLS_WHEN = frozenset({429, 503})
"""The server answers with Retry-After: it did nothing, and says when to ask again."""

TRY_AGAIN = TELLS_WHEN | {500, 502, 504}
"""The same request may succeed later; 502 and 504 come from proxies. Only for requests that may be sent twice: the
client does not know whether the server has acted on the first."""


def make_problem(status: int, detail: str, request_id: str, errors: Sequence[FieldProblem] = ()) -> Problem:
    """The error shape of an answer with this status."""
    kind = KINDS.get(status, "internal" if status >= 500 else "bad_request")
    return Problem(
        type=TYPE + kind, title=TITLES[kind], status=status, detail=detail, request_id=request_id, errors=list(errors)
    )
