"""Logging in with an access token, and out again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from flask import Blueprint, Response, request

from archipel.errors import ApiError, RefusalError
from archipel.server.callers import Identity
from archipel.server.dashboard import browsers, openid_entry, rendering
from archipel.server.dashboard.openid import Provider
from archipel.server.dashboard.pages import HEADERS, LOGIN, ROOT, finish, go_to
from archipel.server.dashboard.session_store import Opening, SessionStore
from archipel.server.http.auth import NOT_VALID
from archipel.server.http.door import Door, at_the_end
from archipel.server.http.page_files import PageFiles
from archipel.server.http.problems import refuse
from archipel.server.http.request_limits import address_source
from archipel.server.http.routes import PUBLIC, READ

_OWN_PAGE = re.compile(r"/dashboard/[A-Za-z0-9._~/-]*(\?[A-Za-z0-9._~=&%+-]*)?")
MOST_TOKEN = 512
"""Characters of a token that are looked at."""
_YEAR = 365 * 86400


def blueprint(door: Door, sessions: SessionStore) -> Blueprint:
    """What is shown without a login: the login itself, and the files of all pages."""
    made = Blueprint("dashboard_entry", __name__)
    openid = door.services.settings.openid
    provider = None if openid is None else Provider(door.services.settings, openid)
    files = PageFiles(rendering.STATIC, stall_seconds=door.services.settings.stall_seconds)

    def show_login() -> Response:
        """The form for a token."""
        session = sessions.find(browsers.read_cookie(door.services.settings))
        if session is not None and session.identity.role in READ:
            return finish(go_to(own_page(request.args.get("next"))))
        return show_form(request.args.get("next"))

    def show_form(wanted: str | None, *, refused: str = "") -> Response:
        return _form(door, wanted, refused=refused, provider=provider.name if provider else "")

    def log_in() -> Response:
        """Open a session for whoever has a token."""
        settings = door.services.settings
        browsers.require_private(settings)
        browsers.require_same_origin()
        token = request.form.get("token", "").strip()
        try:
            identity = _identify(door, token)
        except ApiError as error:
            if error.status != 401:
                raise
            _note_refusal(door)
            return show_form(request.form.get("next"), refused=str(error))
        cookie = sessions.open(Opening.by_token(identity), instead_of=browsers.read_cookie(settings))
        response = finish(go_to(own_page(request.form.get("next"))))
        browsers.set_cookie(response, cookie, settings)
        return response

    def send_file(name: str) -> Response:
        """A style sheet, script or picture of the pages."""
        file = files.find(name)
        if name in rendering.MADE:
            response = files.send_made(name, rendering.MADE[name]())
        elif file is None:
            raise refuse(404, f"the dashboard has no file {name[:100]!r}")
        else:
            response = files.send(file)
        response.headers.update(HEADERS)
        # The address of a page's own reference has a part of the file's digest in it.
        current = rendering.static_address(PurePosixPath(name).as_posix()).endswith(f"?v={request.args.get('v')}")
        response.headers["Cache-Control"] = f"public, max-age={_YEAR}, immutable" if current else "no-cache"
        return response

    def add(path: str, method: str, view: Callable[..., Response], *, download: bool = False) -> None:
        def admitted(**arguments: str) -> Response:
            # Each try to log in counts as the refused request of a stranger does at the API.
            admission = door.admit(PUBLIC, download=download)
            try:
                response = view(**arguments)
            except BaseException as error:
                admission.leave()
                if isinstance(error, RefusalError):
                    door.note(error, admission.source)
                raise
            at_the_end(response, admission.leave)
            return response

        made.add_url_rule(path, view.__name__, admitted, methods=[method], provide_automatic_options=False)

    add(LOGIN, "GET", show_login)
    add(LOGIN, "POST", log_in)
    if provider is not None:
        for path, view in openid_entry.views(door, sessions, provider, own_page=own_page, show_form=show_form):
            add(path, "GET", view)
    add(f"{ROOT}/static/<path:name>", "GET", send_file, download=True)
    return made


def own_page(wanted: str | None) -> str:
    """The page of the dashboard to go on with; the first one for everything that is no page of the dashboard."""
    # A browser would take //host and /\host for another server's address.
    if wanted is None or not _OWN_PAGE.fullmatch(wanted) or "//" in wanted or "/." in wanted:
        return f"{ROOT}/"
    return wanted if not wanted.startswith((LOGIN, f"{ROOT}/logout")) else f"{ROOT}/"


def _identify(door: Door, token: str) -> Identity:
    """Who has the token. Raises ApiError 401 for one that is not valid, and for a device's."""
    if not token or len(token) > MOST_TOKEN or not token.isascii():
        raise refuse(401, NOT_VALID)
    identity = door.authenticator.identify(f"Bearer {token}")
    if identity.role not in READ:
        raise refuse(401, NOT_VALID)
    return identity


def _note_refusal(door: Door) -> None:
    """Count it for the audit log, as the API does."""
    services = door.services
    services.tally.count("access.refused", address_source(request.remote_addr), services.clock())


def _form(door: Door, wanted: str | None, *, refused: str, provider: str) -> Response:
    private = browsers.is_private(door.services.settings)
    html = rendering.render(
        "login.html", None, next=own_page(wanted), refused=refused, private=private, provider=provider,
        warning=browsers.NOT_ENCRYPTED,
    )  # fmt: skip
    response = finish(html)
    response.status_code = 401 if refused else 200
    return response
