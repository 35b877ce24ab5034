"""The meaning of the HTTP statuses of errors, for the server, which answers with them, and for its clients.

`archipel.server.http.problems` has the server's exceptions and their statuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
"""`type` of the error shape (`messages.Problem`), by status."""

TELLS_WHEN = frozenset({429, 503})
"""The server answers with Retry-After: it did nothing, and says when to ask again."""

TRY_AGAIN = TELLS_WHEN | {500, 502, 504}
"""The same request may succeed later; 502 and 504 come from proxies. Only for requests that may be sent twice: the
client does not know whether the server has acted on the first."""
