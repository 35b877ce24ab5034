"""Lets pages of other origins be devices: the answers to their browsers' questions (CORS, the Fetch standard).

A browser lets a page read another origin's answers only where that origin allows it. The setting `allowed_origins` is
the list of those origins, empty by default, and it opens what devices use and nothing else: a page of another origin
cannot read what a route answers that only operators use, whatever token it has. Nothing here authenticates anybody.
Devices have their bearer tokens, and no cookies or client certificates are asked for (there is no
Access-Control-Allow-Credentials).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from archipel.server.http.routes import Route

HEADERS = "Authorization, Content-Type, Digest-SHA256, Range"
"""What devices' requests have beside the headers that every page may send."""
READABLE = "Content-Range, Date, Retry-After, X-Request-Id"
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
        if "Access-Control-Request-Method" not in request.headers or request.method != "OPTIONS" or not permitted():
            return None
        response = Response(status=204)
        response.headers["Access-Control-Allow-Methods"] = method()
        response.headers["Access-Control-Allow-Headers"] = HEADERS
        response.headers["Access-Control-Max-Age"] = str(KEEP_SECONDS)
        return response

    @app.after_request
    def _(response: Response) -> Response:
        # Also where the origin is another one: a cache must not give one origin's answer to the next.
        response.vary.add("Origin")
        if permitted():
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = READABLE
        return response

    def method() -> str:
        """The one that the request has; of a browser's question, the one that it asks about."""
        wanted = request.headers.get("Access-Control-Request-Method")
        return wanted if request.method == "OPTIONS" and wanted is not None else request.method

    def permitted() -> bool:
        """Whether the request comes from an allowed origin, and is about what devices use."""
        if request.headers.get("Origin") not in allowed:
            return False
        try:
            endpoint, _ = app.url_map.bind("").match(request.path, method=method())
        except HTTPException:
            return False
        return endpoint in endpoints
