"""Writes requests.log: one JSON line per request, never with bodies, headers, query strings or tokens."""

from __future__ import annotations

import secrets
import time

import msgspec
from flask import Flask, Response, g, request

from archipel.errors import ServerError
from archipel.server.devices.fetched import FetchedBytes
from archipel.server.http.problems import MAX_PATH
from archipel.server.http.request_measures import Answered, RequestMeasures, show_route
from archipel.server.settings import Settings
from archipel.server.storage.log_files import LogFile
from archipel.server.telemetry import log_lines
from archipel.tracing import Tracer, read_parent

HELD = "archipel.held"
"""In a request's environment: for how many seconds it was kept waiting on purpose, which is no time of work."""

OF_NO_ROUND = "archipel.of_no_round"
"""In a request's environment: its answer is nothing that a round made the device fetch."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """`time` is in Unix seconds; `ms` until the response was ready, without the time for which a check-in was held.

    `device` is the calling device's id, `round_id` that of the path, or None.
    """

    time: float
    method: str
    path: str
    status: int
    ms: float
    bytes_received: int
    bytes_sent: int
    device: str | None
    round_id: str | None
    request_id: str


def register(
    app: Flask,
    settings: Settings,
    measured: RequestMeasures | None = None,
    tracer: Tracer | None = None,
    fetched: FetchedBytes | None = None,
) -> None:
    """Give every request an id, answer with it in X-Request-Id, log it, and have it measured and traced.

    `fetched` counts the bytes that each device is sent.

    Raises ServerError.
    """
    path = settings.request_log
    try:
        requests = LogFile(path, most=settings.log_bytes, kept=settings.logs_kept)
    except OSError as error:
        raise ServerError(f"{path}: cannot be written ({error.strerror})") from None

    @app.before_request
    def _() -> None:
        g.started = time.perf_counter()
        g.request_id = secrets.token_hex(8)
        # Of the path; the route's pattern has made sure that it is an id.
        g.round_id = (request.view_args or {}).get("round_id", "")
        log_lines.set_about(request_id=g.request_id, round_id=g.round_id)
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
            bytes_sent=_size(response),
            device=request.environ.get("archipel.device"),
            round_id=g.round_id or None,
            request_id=g.request_id,
        )
        if entry.device is not None and fetched is not None and OF_NO_ROUND not in request.environ:
            fetched.add(entry.device, entry.bytes_sent)
        if measured is not None:
            rule = None if request.url_rule is None else request.url_rule.rule
            sizes = (entry.bytes_received, entry.bytes_sent)
            measured.answered(Answered(rule, request.endpoint, request.method, entry.status, seconds, *sizes))
        if tracer is not None and g.round_id:
            now = time.time()
            tracer.record(
                f"{entry.method} {show_route(str(request.url_rule))}", now - seconds, now,
                parent=read_parent(request.headers.get("traceparent"), g.round_id),
                attributes={
                    "http.request.method": entry.method,
                    "http.route": show_route(str(request.url_rule)),
                    "http.response.status_code": entry.status,
                    "archipel.request_id": g.request_id,
                },
                error=str(entry.status) if entry.status >= 500 else "",
            )  # fmt: skip
        try:
            requests.write(msgspec.json.encode(entry) + b"\n")
        except OSError:
            # A full disk must not turn an answered request into an error; the health check reports the disk.
            app.logger.warning("requests.log: cannot be written")
        return response


def _size(response: Response) -> int:
    """Bytes of its body; 0 of a stream, which has no length and would be read to its end to find one out."""
    if response.content_length is not None:
        return response.content_length
    return (response.calculate_content_length() or 0) if response.is_sequence else 0
