"""Turns every error into the API's one JSON error shape: the server's own, the framework's, and unexpected ones."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from flask import Flask, Response, g, request
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug.exceptions import ClientDisconnected, HTTPException, NotFound

from archipel.errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    ProtocolError,
    RefusalError,
)
from archipel.protocol.messages import FieldProblem
from archipel.protocol.problems import CONTENT_TYPE, TELLS_WHEN, make_problem
from archipel.server.http.field_problems import named
from archipel.server.storage import StorageUnreachableError

log = logging.getLogger("archipel.server")

STATUS: dict[type[RefusalError], int] = {
    ForbiddenError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    GoneError: 410,
    InvalidRequestError: 422,
}
"""The HTTP status of errors that the other rooms of the server raise."""
RETRY_SECONDS = 1
MAX_PATH = 256
"""Characters of a path that are shown or logged."""
_POSTGRESQL = {
    "23505": "the same request is being served",  # unique violation
    "40001": "the database is busy",  # serialization failure
    "40P01": "the database is busy",  # deadlock
    "53100": "the server's disk is full",
    "53300": "the database has no connection to spare",
    "55P03": "the database is busy",  # lock not available
    "57P01": "the database is not reachable",  # it shuts down
    "57P03": "the database is not reachable",  # it starts
}
"""PostgreSQL errors, by SQLSTATE, after which a retry may succeed."""


def refuse(status: int, message: str, *, retry_after: int = RETRY_SECONDS) -> ApiError:
    """The error to raise for a request that cannot be served; `retry_after` (seconds) goes with 429 and 503."""
    return ApiError(status, message, retry_after)


def api_error(error: RefusalError) -> ApiError:
    """The error as an ApiError, which has an HTTP status."""
    return error if isinstance(error, ApiError) else refuse(STATUS[type(error)], str(error))


@contextmanager
def refusing(status: int) -> Iterator[None]:
    """Answer a ProtocolError in the block with `status`: the caller sent something invalid."""
    try:
        yield
    except ProtocolError as error:
        raise refuse(status, str(error)) from None


def problem_response(
    status: int, message: str, retry_after: int = RETRY_SECONDS, errors: Sequence[FieldProblem] = ()
) -> Response:
    problem = make_problem(status, message, g.request_id, errors)
    response = Response(msgspec.json.encode(problem), status, mimetype=CONTENT_TYPE)
    if status in TELLS_WHEN:
        response.headers["Retry-After"] = str(retry_after)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


Answer = Callable[[int, str, int, Sequence[FieldProblem]], Response]
"""Makes the answer of a status, a message, the seconds after which to try again, and what is wrong with fields."""


def register(app: Flask, answer: Answer = problem_response) -> None:
    """Register handlers with `app` that answer every error; `answer` gives them their shape."""

    @app.errorhandler(RefusalError)
    def _(refusal: RefusalError) -> Response:
        error = api_error(refusal)
        # A route has noted the fields where the error's text is not all that is known of them.
        errors = g.get("field_problems") or named(str(error), g.get("request_kind"))
        return answer(error.status, str(error), error.retry_after, errors)

    @app.errorhandler(HTTPException)
    def _(error: HTTPException) -> Response:
        # Werkzeug reports the timeout of the listener's sockets as a client that has gone; this one may still be there.
        if isinstance(error, ClientDisconnected) and isinstance(error.__context__, BlockingIOError | TimeoutError):
            return answer(503, "the request's body did not arrive in time; try again", RETRY_SECONDS, ())
        message = error.description or error.name
        if isinstance(error, NotFound):
            path = request.path[:MAX_PATH]
            message = f"{path}: this path names nothing here; ids have 32 hexadecimal digits, digests 64"
        response = answer(error.code or 500, message, RETRY_SECONDS, ())
        # Of the framework's own headers only those that the status requires.
        for name, value in error.get_headers():
            if name in ("Allow", "Content-Range"):
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    def _(error: Exception) -> Response:
        why = _overloaded(error)
        if why:
            log.warning("request %s: %s (%s)", g.request_id, why, _first_line(error))
            return answer(503, f"{why}; try again", RETRY_SECONDS, ())
        log.error("request %s failed", g.request_id, exc_info=error)
        return answer(500, "the server made an error; its log has it under this request id", RETRY_SECONDS, ())


def _overloaded(error: Exception) -> str:
    """A plain description of an error after which a retry may succeed; empty for all others."""
    if isinstance(error, PoolTimeout):
        return "the server is busy"
    if isinstance(error, DBAPIError):
        if isinstance(error.orig, sqlite3.Error):
            primary = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # extended codes have it in the lowest byte
            return {
                sqlite3.SQLITE_BUSY: "the database is busy",
                sqlite3.SQLITE_LOCKED: "the database is busy",
                sqlite3.SQLITE_FULL: "the server's disk is full",
                sqlite3.SQLITE_CONSTRAINT: "the same request is being served",
            }.get(primary, "")
        state = getattr(error.orig, "sqlstate", None)
        # If no connection could be made there is no SQLSTATE, and no connection that could be invalidated.
        if error.connection_invalidated or (state is None and isinstance(error, OperationalError)):
            return "the database is not reachable"
        return _POSTGRESQL.get(str(state), "")
    if isinstance(error, StorageUnreachableError):
        return "the object store is not reachable"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the server's disk is full"
    return ""


def _first_line(error: Exception) -> str:
    """The driver's message. SQLAlchemy's contains the statement with its parameters, which do not belong in logs."""
    return next(iter(str(getattr(error, "orig", None) or error).splitlines()), type(error).__name__)
