"""What browsers say of a request: over which connection it came, from which page, and which cookie it has."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from flask import Response, request

from archipel.server.http.problems import refuse
from archipel.server.settings import Settings, is_loopback

SECURE_COOKIE = "__Host-archipel"
"""Browsers take a cookie of such a name only over TLS, for this host alone and for all its paths."""
LOCAL_COOKIE = "archipel-local"
SECURE_ATTEMPT, LOCAL_ATTEMPT = f"{SECURE_COOKIE}-login", f"{LOCAL_COOKIE}-login"
"""Where the browser and the server are on one machine and speak plain HTTP."""
NOT_ENCRYPTED = (
    "this connection is not encrypted, so that anybody on the way could read the token; open the dashboard over HTTPS "
    "(`tls_certificate`, or a proxy with TLS), or from the server's own machine, such as with "
    "`ssh -L 8470:localhost:8470 SERVER`"
)


def is_encrypted(settings: Settings) -> bool | None:
    """Whether the browser speaks TLS with the server or with a proxy in front of it; None: it does not say.

    Headers of the browser say it, and not those of a proxy: a proxy may rewrite `Host`, and need not say anything else.
    """
    if settings.tls_certificate:
        return True
    origin = request.headers.get("Origin", "")
    if origin.startswith("https://"):
        return True
    if origin.startswith("http://"):
        return False
    return None


def is_local() -> bool:
    """Whether the browser's page is of this machine, as its address says."""
    origin = request.headers.get("Origin", "")
    host = urlsplit(origin if origin.startswith("http") else f"//{request.host}").hostname
    return host is not None and (is_loopback(host) or host.endswith(".localhost"))


def is_private(settings: Settings) -> bool:
    """Whether nobody between browser and server can read the connection, as far as the browser says."""
    if is_encrypted(settings) or is_local():
        return True
    # Browsers send these headers to addresses over TLS, and to their own machine.
    return is_encrypted(settings) is None and "Sec-Fetch-Site" in request.headers


def require_private(settings: Settings) -> None:
    """Raise ApiError 403 where a token would travel in the clear."""
    if is_encrypted(settings) is False and not is_local():
        raise refuse(403, NOT_ENCRYPTED)


def require_same_origin() -> None:
    """Raise ApiError 403 for a form that another site's page has sent.

    A page of an attacker could otherwise log somebody in as the attacker. Browsers send one of the two headers with
    each form; who sends neither is no browser, and has no cookies to be abused.
    """
    site = request.headers.get("Sec-Fetch-Site")
    origin = request.headers.get("Origin")
    same = site == "same-origin" if site is not None else origin is None or urlsplit(origin).netloc == request.host
    if not same:
        raise refuse(403, "this form was sent by a page of another site; open the dashboard itself and try again")


def require_token(given: bytes, csrf: str) -> None:
    """Raise ApiError 403 for a form whose token is not that of the session.

    It is compared as bytes: of texts compare_digest takes ASCII alone.
    """
    if not hmac.compare_digest(given, csrf.encode()):
        raise refuse(403, "this form is not of your session; open the page again and send it from there")


def read_cookie(settings: Settings) -> str | None:
    """The cookie of the session, if the browser has one."""
    # Anybody on the way of a plain connection can set a cookie of the other name for a host that is not this machine.
    local = is_local() and not is_encrypted(settings)
    return request.cookies.get(SECURE_COOKIE) or (request.cookies.get(LOCAL_COOKIE) if local else None)


def set_cookie(response: Response, value: str, settings: Settings) -> None:
    """Have the browser keep the cookie until it is closed. It goes over TLS only, unless the page is a local one."""
    plain = is_local() and not is_encrypted(settings)
    response.set_cookie(
        LOCAL_COOKIE if plain else SECURE_COOKIE, value, secure=not plain, httponly=True, samesite="Strict", path="/"
    )


def read_attempt(settings: Settings) -> str | None:
    """The cookie of a login that is under way at a provider of identities."""
    local = is_local() and not is_encrypted(settings)
    return request.cookies.get(SECURE_ATTEMPT) or (request.cookies.get(LOCAL_ATTEMPT) if local else None)


def set_attempt(response: Response, value: str, settings: Settings, seconds: float) -> None:
    """Have the browser keep it for so long, and send it along when the provider's page leads back here."""
    plain = is_local() and not is_encrypted(settings)
    response.set_cookie(
        LOCAL_ATTEMPT if plain else SECURE_ATTEMPT, value, max_age=int(seconds), secure=not plain, httponly=True,
        samesite="Lax", path="/",
    )  # fmt: skip


def clear_attempt(response: Response) -> None:
    """Have the browser forget it."""
    response.delete_cookie(SECURE_ATTEMPT, secure=True, httponly=True, samesite="Lax", path="/")
    response.delete_cookie(LOCAL_ATTEMPT, httponly=True, samesite="Lax", path="/")


def clear_cookie(response: Response) -> None:
    """Have the browser forget it."""
    response.delete_cookie(SECURE_COOKIE, secure=True, httponly=True, samesite="Strict", path="/")
    response.delete_cookie(LOCAL_COOKIE, httponly=True, samesite="Strict", path="/")
