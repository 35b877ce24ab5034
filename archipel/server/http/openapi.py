"""Makes the OpenAPI 3.1 document of the API from the declarations that decode requests and encode answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from archipel.protocol.messages import Problem
from archipel.protocol.problems import CONTENT_TYPE, KINDS, TITLES
from archipel.server.http.examples import EXAMPLES
from archipel.server.http.routes import CONVERTERS, MESSAGEPACK, Route, content_type

VERSION = "3.1.0"
_PARAMETER = re.compile(r"<(\w+):(\w+)>")
_REFERENCE = "#/components/schemas/{name}"
_BYTES = {"type": "string", "format": "binary"}
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_TOKENS = {
    "device": "Session token of a device: POST /v1/challenges, then /v1/sessions.",
    "operator": "Access token of an operator, who has models trained and rolled out.",
    "analyst": "Access token of an analyst, who asks devices questions: evaluations and analyses.",
    "auditor": "Access token of an auditor, who reads everything and changes nothing.",
    "admin": "Access token of an admin, or the token that `archipel serve init` printed.",
}


def document(resources: Mapping[str, Sequence[Route]], *, version: str) -> dict[str, Any]:
    """The document of all `resources` (routes by the name of their resource), as JSON values."""
    routes = [route for each in resources.values() for route in each]
    kinds = [
        kind
        for route in routes
        for kind in (route.request, route.response, route.query)
        if kind is not None and content_type(kind) != MESSAGEPACK
    ]
    schemas, components = msgspec.json.schema_components([*kinds, Problem], ref_template=_REFERENCE)
    _add_base64_pattern(components)
    for component in components.values():
        # An example there is one in Python.
        if "description" in component:
            component["description"] = re.split(r"\n\s*\n *Example:[\n ]", component["description"])[0]
    # msgspec returns the schemas in the order of the types.
    known = dict(zip([*kinds, Problem], schemas))
    paths: dict[str, dict[str, Any]] = {}
    for name, each in resources.items():
        for route in each:
            operations = paths.setdefault(_PARAMETER.sub(r"{\2}", route.path), {})
            operations[route.method.lower()] = _operation(name, route, known, components)
    # The document has query strings as parameters, so their structs are left out of the schemas.
    queries = {kind.__name__ for route in routes if (kind := route.query) is not None}
    return {
        "openapi": VERSION,
        "info": {
            "title": "archipel",
            "version": version,
            "summary": "A federation server: devices, bundles, tasks, rounds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "this server"}],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in sorted(components.items()) if name not in queries},
            "securitySchemes": {
                role: {"type": "http", "scheme": "bearer", "description": text} for role, text in _TOKENS.items()
            },
        },
    }


def _add_base64_pattern(schema: Any) -> None:
    """Add a pattern to base64 strings: JSON Schema's contentEncoding alone is an annotation that validators ignore."""
    if isinstance(schema, dict):
        if schema.get("contentEncoding") == "base64":
            schema["pattern"] = _BASE64
        for inner in schema.values():
            _add_base64_pattern(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _add_base64_pattern(inner)


def _operation(resource: str, route: Route, known: Mapping[Any, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [resource],
        "parameters": [*_in_path(route), *_in_query(route, components), *_in_headers(route)],
        "responses": {str(status): _answer(route, known) for status in _successes(route)},
        "security": [] if "anyone" in route.roles else [{role: []} for role in sorted(route.roles)],
    }
    problem = {CONTENT_TYPE: {"schema": known[Problem]}}
    for status in _failures(route):
        made["responses"][str(status)] = {"description": TITLES[KINDS[status]], "content": problem}
    if route.request is not None:
        made["requestBody"] = {
            "required": True,
            "content": _content(route.request, known),
        }
        if route.name in EXAMPLES:
            made["requestBody"]["content"]["application/json"]["example"] = EXAMPLES[route.name]
    elif route.takes:
        made["requestBody"] = {"required": True, "content": {route.takes: {"schema": _BYTES}}}
    return made


def _in_path(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _text(CONVERTERS[converter].regex)}
        for converter, name in _PARAMETER.findall(route.path)
    ]


def _text(pattern: str) -> dict[str, str]:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _in_query(route: Route, components: Mapping[str, Any]) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = components[route.query.__name__]
    needed = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in needed, "schema": of}
        for name, of in schema["properties"].items()
    ]


def _in_headers(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": True, "schema": _text(pattern)}
        for name, pattern in route.headers.items()
    ]


def _answer(route: Route, known: Mapping[Any, Any]) -> dict[str, Any]:
    if route.response is not None:
        return {
            "description": route.summary,
            "content": _content(route.response, known),
        }
    return {"description": route.summary, "content": {route.gives: {"schema": _BYTES}} if route.gives else {}}


def _content(kind: Any, known: Mapping[Any, Any]) -> dict[str, Any]:
    if content_type(kind) == MESSAGEPACK:
        # JSON Schema has no bytes, so it cannot say what is in it.
        what = f"MessagePack of the array {kind.__name__.lower()} (docs/protocol.md, Steps)."
        return {MESSAGEPACK: {"schema": {**_BYTES, "description": what}}}
    return {"application/json": {"schema": known[kind]}}


def _successes(route: Route) -> list[int]:
    if route.gives:
        return [200, 206, 304]
    # A request that would create the same object again gets 200 and the object that is there.
    return [route.status] if route.status == 200 else [200, route.status]


def _failures(route: Route) -> list[int]:
    """The statuses with which the route may answer a Problem. Any request may be throttled (429) or fail (503)."""
    statuses = {400, 429, 503}
    if "anyone" not in route.roles:
        statuses |= {401, 403}
    if _PARAMETER.search(route.path) or route.query is not None:
        statuses |= {404}
    if route.gives:
        statuses |= {416}
    if route.request is not None or route.takes:
        statuses |= {403, 404, 409, 410, 411, 413, 415, 422}
    if route.members or route.method == "POST":
        statuses |= {409, 410}
    return sorted(statuses)
