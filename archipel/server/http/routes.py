"""Routes as data: method, path, roles, and the types of body and answer. Handlers get decoded bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import msgspec
from flask import Blueprint, Response, g, request
from sqlalchemy.exc import IntegrityError
from werkzeug.routing import BaseConverter

from archipel.errors import RefusalError
from archipel.server.callers import Identity, Role
from archipel.server.http.door import Door, at_the_end
from archipel.server.http.field_problems import undecoded, unread
from archipel.server.http.problems import refuse
from archipel.server.services import Services

B = TypeVar("B")
PUBLIC: frozenset[Role] = frozenset({"anyone", "device", "operator", "analyst", "auditor", "admin"})
DEVICE: frozenset[Role] = frozenset({"device"})
ADMIN: frozenset[Role] = frozenset({"admin"})
OPERATOR: frozenset[Role] = frozenset({"operator", "admin"})
ANALYST: frozenset[Role] = frozenset({"analyst", "admin"})
AUDIT: frozenset[Role] = frozenset({"auditor", "admin"})
READ: frozenset[Role] = OPERATOR | ANALYST | AUDIT


MESSAGEPACK = "application/msgpack"


@dataclass(frozen=True)
class Call(Generic[B]):
    """One request, as a handler sees it. `body` was decoded from the bytes `raw`; `query` is the struct that the route
    declares for its query string, or None; `key` the idempotency key where it does not come as a header."""

    services: Services
    identity: Identity
    body: B
    raw: bytes
    query: Any = None
    key: str | None = None


@dataclass(frozen=True)
class Route:
    """One line of the API. `request` and `response` are structs (or lists of them), None where the body is bytes.
    Structs that are arrays (`array_like`) travel as MessagePack, all others as JSON.

    `path` is in Flask's syntax, `query` a struct of the query string's parameters, `takes` and `gives` the content
    types of bodies that are bytes, `headers` the patterns of headers that a request must have. With `members` a
    device must be a participant of the round in the path. With `everywhere` a token must be for all populations.
    With `download` it is a file that anyone gets, with limits of its own. `foresee` refuses what the handler would
    refuse, and tells what is likely to go wrong, without doing anything. The handler returns the response struct,
    encoded JSON (bytes), a pair of struct and status, or a Response.
    """

    method: Literal["GET", "POST", "PUT"]
    path: str
    roles: frozenset[Role]
    handler: Callable[..., Any]
    request: Any = None
    response: Any = None
    status: int = 200
    members: bool = False
    everywhere: bool = False
    download: bool = False
    query: type[msgspec.Struct] | None = None
    takes: str = ""
    gives: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    foresee: Callable[[Call[Any]], list[str]] | None = None

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def summary(self) -> str:
        return (self.handler.__doc__ or "").strip().split("\n", 1)[0]


class IdConverter(BaseConverter):
    """A round's, task's or device's id."""

    regex = "[0-9a-f]{32}"


class DigestConverter(BaseConverter):
    """A SHA-256 in hexadecimal."""

    regex = "[0-9a-f]{64}"


class NameConverter(BaseConverter):
    """A population's or model's name."""

    regex = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


class NumberConverter(BaseConverter):
    """A number from 1 on: of a version, or of a part."""

    # Nine digits at most, which fit into an integer of any database.
    regex = "[1-9][0-9]{0,8}"


CONVERTERS: dict[str, type[BaseConverter]] = {
    "id": IdConverter,
    "digest": DigestConverter,
    "name": NameConverter,
    "number": NumberConverter,
}


def blueprint(name: str, routes: Iterable[Route], door: Door) -> Blueprint:
    """The Flask blueprint of one resource. Authentication, limits, decoding and encoding happen here for all routes."""
    routed = Blueprint(name, __name__)
    for route in routes:
        routed.add_url_rule(
            route.path,
            route.name,
            _view(route, door),
            methods=[route.method],
            # Every method of a path is a line of the table, with its roles; Flask would add OPTIONS for everybody.
            provide_automatic_options=False,
        )
    return routed


def _view(route: Route, door: Door) -> Callable[..., Response]:
    decoder = None if route.request is None else _format(route.request).Decoder(route.request)
    for kind in (route.query, route.response):
        # msgspec examines a type on its first use, which must happen before there are threads: see protocol.sealed.
        _format(kind).Decoder(kind)
    # Sorted keys: the same answer is the same bytes, however often a request is repeated.
    encoder = _format(route.response).Encoder(order="sorted")
    what = re.sub(r"[^A-Za-z]+", " ", getattr(route.request, "__name__", "")).strip()

    def view(**arguments: str) -> Response:
        admitted = door.admit(route.roles, download=route.download)
        try:
            response = serve(admitted.identity, arguments)
        except BaseException as error:
            # There is no response that could free the place when it has been sent.
            admitted.leave()
            if isinstance(error, RefusalError):
                door.note(error, admitted.source)
            raise
        at_the_end(response, admitted.leave)
        return response

    def serve(identity: Identity, arguments: dict[str, str]) -> Response:
        query = None if route.query is None else _query(route.query)
        raw, body = b"", None
        coding = request.headers.get("Content-Encoding", "identity").lower()
        if coding != "identity" and (decoder is not None or route.takes):
            raise refuse(415, "a compressed body is not accepted; send it as it is, without Content-Encoding")
        if decoder is not None:
            raw = request.get_data(cache=False)
            try:
                body = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                g.field_problems = undecoded(error)
                raise refuse(400, f"the body is not a {what}: {error}") from None
            g.request_kind = route.request
        answer = serve_call(route, Call(door.services, identity, body, raw, query), arguments)
        if isinstance(answer, Response):
            return answer
        answer, status = answer if isinstance(answer, tuple) else (answer, route.status)
        # Bytes are JSON that was encoded before, such as a round's survivors, once for all devices.
        data = answer if isinstance(answer, bytes) else encoder.encode(answer)
        return Response(data, status, mimetype=content_type(route.response))

    return view


def content_type(kind: Any) -> str:
    """That of a body which is a struct of this kind."""
    return MESSAGEPACK if _format(kind) is msgspec.msgpack else "application/json"


def _format(kind: Any) -> Any:
    """The module of msgspec that encodes a body of this kind."""
    is_array = isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.array_like
    return msgspec.msgpack if is_array else msgspec.json


def serve_call(route: Route, call: Call[Any], arguments: Mapping[str, str]) -> Any:
    """Call the handler, and once more if another process inserted the same row at the same moment.

    Its transaction was rolled back as a whole, and the second time it finds the other's row. A streamed body was
    consumed by then, so its sender must try again. Raises ForbiddenError for a token of some populations where the
    route needs all.
    """
    if route.everywhere:
        call.identity.require_all()
    try:
        return route.handler(call, **arguments)
    except IntegrityError:
        if route.takes:
            raise refuse(503, "somebody stored the same at this moment; send it again", retry_after=1) from None
        return route.handler(call, **arguments)


def _query(kind: type[msgspec.Struct]) -> msgspec.Struct:
    values = request.args.to_dict(flat=False)
    double = [name for name, given in values.items() if len(given) > 1]
    # Flask would take the first of the two, and the other would be ignored without a word.
    if double:
        raise refuse(400, f"query parameter {double[0]!r} is given twice")
    try:
        return msgspec.convert({name: given[0] for name, given in values.items()}, kind, strict=False)
    except msgspec.ValidationError as error:
        g.field_problems = unread(error)
        raise refuse(400, f"the query string is wrong: {error}") from None
