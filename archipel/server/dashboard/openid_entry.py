"""Logging in at the dashboard by a provider of identities: the way to the provider, and the way back.

What the browser has to bring back is in a cookie that this server signs, so an answer can only be used in the browser
that has asked for it, and once, as the provider takes a code once.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable

import msgspec
from flask import Response, redirect, request

from archipel.server.dashboard import browsers, rendering
from archipel.server.dashboard.openid import CALLBACK, Attempt, OpenIdError, Provider
from archipel.server.dashboard.pages import LOGIN, finish
from archipel.server.dashboard.session_store import Opening, SessionStore
from archipel.server.http.door import Door
from archipel.server.http.request_limits import address_source

BEGIN = f"{LOGIN}/openid"
SECONDS = 600.0
"""How long somebody may take at the provider."""
_MOST_COOKIE = 4096
View = Callable[[], Response]


def views(
    door: Door, sessions: SessionStore, provider: Provider, *, own_page: Callable[[str | None], str],
    show_form: Callable[..., Response],
) -> tuple[tuple[str, View], ...]:  # fmt: skip
    """The two GET pages, with their paths. `show_form(wanted, refused=...)` is the page of the login."""
    services = door.services

    def begin_openid() -> Response:
        """Send the browser to the provider."""
        wanted = own_page(request.args.get("next"))
        try:
            url, attempt = provider.begin(wanted=wanted, now=services.clock(), seconds=SECONDS)
        except OpenIdError as error:
            return show_form(wanted, refused=str(error))
        response = redirect(url, 303)
        assert isinstance(response, Response)
        browsers.set_attempt(response, _sign(attempt, services.settings.login_key), services.settings, SECONDS)
        return finish(response)

    def finish_openid() -> Response:
        """Open a session for whoever the provider has sent back."""
        settings = services.settings
        attempt = _verify(browsers.read_attempt(settings), settings.login_key)
        try:
            if attempt is None:
                raise OpenIdError("this browser has begun no login, or too long ago; try again")
            identity = provider.finish(attempt, request.args.to_dict(), now=services.clock())
        except OpenIdError as error:
            services.tally.count("access.refused", address_source(request.remote_addr), services.clock())
            response = show_form(attempt.next if attempt else None, refused=str(error))
        else:
            cookie = sessions.open(Opening.by_provider(identity), instead_of=browsers.read_cookie(settings))
            # A page and no redirect: browsers send the session's cookie along only where a page of this server, and
            # not the provider's, has led.
            response = finish(rendering.render("welcome.html", None, next=own_page(attempt.next)))
            browsers.set_cookie(response, cookie, settings)
        browsers.clear_attempt(response)
        return response

    return (BEGIN, begin_openid), (CALLBACK, finish_openid)


def _sign(attempt: Attempt, key: bytes) -> str:
    data = msgspec.json.encode(attempt)
    return base64.urlsafe_b64encode(hmac.digest(key, data, "sha256") + data).decode()


def _verify(cookie: str | None, key: bytes) -> Attempt | None:
    """The attempt in a cookie; None for one that this server has not signed."""
    if cookie is None or len(cookie) > _MOST_COOKIE:
        return None
    try:
        signed = base64.urlsafe_b64decode(cookie.encode())
    except (binascii.Error, UnicodeEncodeError):
        return None
    signature, data = signed[:32], signed[32:]
    if not hmac.compare_digest(hmac.digest(key, data, "sha256"), signature):
        return None
    return msgspec.json.decode(data, type=Attempt)
