"""Logging out."""

from __future__ import annotations

from flask import Response

from archipel.server.dashboard import browsers
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import LOGIN, ROOT, Page, go_to
from archipel.server.dashboard.session_store import SessionStore


def log_out(desk: Desk) -> Response:
    """End the session, here and on the server."""
    store = SessionStore(desk.services)
    session = store.find(browsers.read_cookie(desk.services.settings))
    if session is not None:
        store.close(session)
    response = go_to(LOGIN)
    browsers.clear_cookie(response)
    return response


PAGES = (Page("POST", f"{ROOT}/logout", log_out),)
