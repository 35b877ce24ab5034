"""Writes requests.log: one JSON line per request, never with bodies, headers, query strings or tokens."""

from __future__ import annotations

import secrets
import time

import msgspec
from flask import Flask, Response, g, request

from archipel.errors import ServerError
from archipel.server.http.problems import MAX_PATH
from archipel.server.http.request_measures import Answered, RequestMeasures
from archipel.server.settings import Settings
from archipel.server.storage.log_files import LogFile

HELD = "archipel.held"
"""In a request's environment: for how many seconds it was kept waiting on purpose, which is no time of work."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """`time` is in Unix seconds; `ms` until the response was ready, without the time for which a check-in was held;
    `device` is the calling device's id, or None."""

    time: float
    method: str
    path: str
    status: int
    ms: float
    bytes_received: int
    bytes_sent: int
    device: str | None
    request_id: str


def register(app: Flask, settings: Settings, measured: RequestMeasures | None = None) -> None:
    """Give every request an id, answer with it in X-Request-Id, log it, and have it measured. Raises ServerError."""
    path = settings.request_log
    try:
        requests = LogFile(path, most=settings.log_bytes, kept=settings.logs_kept)
    except OSError as error:
        raise ServerError(f"{path}: cannot be written ({error.strerror})") from None

    @app.before_request
    def _() -> None:
        g.started = time.perf_counter()
        g.request_id = secrets.token_hex(8)
        if measured is not None:
            measured.begun()

    @app.after_request
    def _(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        seconds = time.perf_counter() - g.started - request.environ.get(HELD, 0.0)
        entry = Entry(
            time=round(time.time(), 3),
            method=request.method,
            path=request.path[:MAX_PATH],
            status=response.status_code,
            ms=round(seconds * 1000, 2),
            bytes_received=request.content_length or 0,
            bytes_sent=response.content_length or response.calculate_content_length() or 0,
            device=request.environ.get("archipel.device"),
            request_id=g.request_id,
        )
        if measured is not None:
            rule = None if request.url_rule is None else request.url_rule.rule
            sizes = (entry.bytes_received, entry.bytes_sent)
            measured.answered(Answered(rule, request.endpoint, request.method, entry.status, seconds, *sizes))
        try:
            requests.write(msgspec.json.encode(entry) + b"\n")
        except OSError:
            # A full disk must not turn an answered request into an error; the health check reports the disk.
            app.logger.warning("requests.log: cannot be written")
        return response
