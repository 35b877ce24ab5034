"""The dashboard's pages as a table, and what all of them have in common: login, CSRF, headers, errors.

The table says which of the API's routes a page asks. Whoever may not ask one of them gets no such page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from flask import Blueprint, Response, g, redirect, request

from archipel.errors import RefusalError
from archipel.server.callers import Identity
from archipel.server.dashboard import browsers, rendering
from archipel.server.dashboard.desk import Desk, Routes
from archipel.server.dashboard.file_form import read_file_form
from archipel.server.dashboard.session_store import PersonalSession, SessionStore
from archipel.server.http.door import Door, at_the_end
from archipel.server.http.problems import refuse
from archipel.server.http.routes import READ

ROOT = "/dashboard"
LOGIN = f"{ROOT}/login"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`, with which browsers would not say from which page a form comes.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    # What a page shows is for one person, and not for who uses the browser after them.
    "Cache-Control": "no-store",
}
View = Callable[..., Response | str]


@dataclass(frozen=True)
class Page:
    """One line of the dashboard. `view` gets a Desk and the path's arguments, and returns HTML or a Response; `asks`
    are the names of the API's routes without which the page makes no sense. `streams`: the answer is a stream that goes
    on, for which the view has found a place. `receives`: the form comes with a file, a bundle."""

    method: Literal["GET", "POST"]
    path: str
    view: View
    asks: tuple[str, ...] = ()
    streams: bool = False
    receives: bool = False

    @property
    def name(self) -> str:
        return f"{self.method.lower()}_{self.view.__module__.rsplit('.', 1)[1]}_{self.view.__name__}"


def blueprint(pages: Iterable[Page], door: Door, routes: Routes, sessions: SessionStore) -> Blueprint:
    """The pages that need a login, as a blueprint."""
    made = Blueprint("dashboard", __name__)
    for page in pages:
        made.add_url_rule(
            page.path, page.name, _view(page, door, routes, sessions), methods=[page.method],
            provide_automatic_options=False,
            # Else Flask would lead from /dashboard to an address with http:// in it, also behind a proxy with TLS.
            strict_slashes=False,
        )  # fmt: skip
    return made


def _view(page: Page, door: Door, routes: Routes, sessions: SessionStore) -> Callable[..., Response]:
    def view(**arguments: str) -> Response:
        found: list[PersonalSession] = []

        def identify() -> Identity:
            session = sessions.find(browsers.read_cookie(door.services.settings))
            if session is None:
                raise refuse(401, "you are not logged in, or your session has ended")
            found.append(session)
            return session.identity

        admitted = door.admit(READ, identify=identify)
        try:
            response = answer(found[0], arguments)
        except BaseException as error:
            admitted.leave()
            if isinstance(error, RefusalError):
                door.note(error, admitted.source)
            raise
        if page.streams:
            # It has a place among the streams, and would take those of this person's requests for as long.
            admitted.leave()
        else:
            at_the_end(response, admitted.leave)
        return response

    def answer(session: PersonalSession, arguments: dict[str, str]) -> Response:
        desk = g.desk = Desk(
            services=door.services, routes=routes, identity=session.identity, csrf=session.csrf, path=request.path,
            form={}, query=request.args.to_dict(), session=session.digest,
        )  # fmt: skip
        if not desk.may(*page.asks):
            bound = " of some populations" if session.identity.populations is not None else ""
            raise refuse(403, f"this is not for the role {session.identity.role!r}{bound}")
        if page.method == "POST":
            browsers.require_same_origin()
            desk = g.desk = _receive(desk) if page.receives else _checked(desk)
        return finish(page.view(desk, **arguments))

    return view


def _checked(desk: Desk) -> Desk:
    """The desk with the request's form, which a page of this session has made. Raises ApiError 403."""
    form = request.form.to_dict()
    browsers.require_token(form.pop("csrf", "").encode(), desk.csrf)
    return replace(desk, form=form)


def _receive(desk: Desk) -> Desk:
    """The desk with the file of the request's form, which a page of this session has made. Raises ApiError."""
    return replace(desk, file=read_file_form(desk.csrf, desk.services.settings.max_bundle_bytes))


def finish(answer: Response | str) -> Response:
    """The answer as a response with the headers of all pages."""
    response = Response(answer, mimetype="text/html") if isinstance(answer, str) else answer
    response.headers.update(HEADERS)
    return response


def go_to(path: str) -> Response:
    """Have the browser open another page of the dashboard."""
    response = redirect(path, 303)
    assert isinstance(response, Response)
    return response


def problem_page(status: int, message: str, retry_after: int, *_: Any) -> Response:
    """An error as a page. Who is not logged in goes to the login, and from there back to the page."""
    if status == 401 and request.method == "GET" and request.path != LOGIN:
        return finish(go_to(f"{LOGIN}?next={quote(request.full_path.rstrip('?'), safe='')}"))
    html = rendering.render(
        "problem.html", g.get("desk"), status=status, message=message, request_id=g.get("request_id", "")
    )
    response = finish(html)
    response.status_code = status
    if status in (429, 503):
        response.headers["Retry-After"] = str(retry_after)
    return response
