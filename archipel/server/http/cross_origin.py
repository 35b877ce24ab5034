"""Lets pages of other origins be devices: the answers to their browsers' questions (CORS, the Fetch standard).

A browser lets a page read another origin's answers only where that origin allows it. The setting `allowed_origins` is
the list of those origins, empty by default, and it opens what devices use and nothing else: no page of another origin
gets an answer on an operator's routes, whatever token it has. Nothing here authenticates anybody. Devices have their
bearer tokens, and no cookies or client certificates are asked for (there is no Access-Control-Allow-Credentials).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from archipel.server.http.routes import Route

HEADERS = "Authorization, Content-Type, Digest-SHA256"
"""What devices' requests have beside the headers that every page may send."""
READABLE = "Date, Retry-After, X-Request-Id"
"""What a page may read of an answer beside the headers that every page may read."""
KEEP_SECONDS = 7200
"""How long a browser need not ask again about one address; browsers keep it for less, if they want."""


def register(app: Flask, origins: Collection[str], routes: Iterable[tuple[str, Route]]) -> None:
    """Answer pages of these origins; `routes` are all routes of the API with their endpoints' names."""
    if not origins:
        return
    allowed = frozenset(origins)
    endpoints = {name for name, route in routes if route.path.startswith("/v1/") and "device" in route.roles}

    @app.before_request
    def _() -> Response | None:
        wanted = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or wanted is None or not permitted(wanted):
            return None
        response = Response(status=204)
        response.headers["Access-Control-Allow-Methods"] = wanted
        response.headers["Access-Control-Allow-Headers"] = HEADERS
        response.headers["Access-Control-Max-Age"] = str(KEEP_SECONDS)
        return response

    @app.after_request
    def _(response: Response) -> Response:
        # Also where the origin is another one: a cache must not give one origin's answer to the next.
        response.vary.add("Origin")
        if permitted(request.headers.get("Access-Control-Request-Method", request.method)):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = READABLE
        return response

    def permitted(method: str) -> bool:
        """Whether the request comes from an allowed origin, and asks with this method for what devices use."""
        if request.headers.get("Origin") not in allowed:
            return False
        try:
            endpoint, _ = app.url_map.bind("").match(request.path, method=method)
        except HTTPException:
            return False
        return endpoint in endpoints
