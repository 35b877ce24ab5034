"""Write docs/api.md: the API's own description (OpenAPI, /v1/openapi.json) as a page for people."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from archipel import __version__
from archipel.server.http.api import RESOURCES
from archipel.server.http.openapi import document
from archipel.server.http.routes import MESSAGEPACK, content_type

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
HEAD = """# The API

`python scripts/api_page.py` writes this page from the declarations that decode requests and encode answers; do not edit
it. Every server has the same as a page at `/api/` and as OpenAPI 3.1 at `/v1/openapi.json`, with examples.

Requests and answers are JSON unless a table says otherwise. Send a token as `Authorization: Bearer TOKEN`. The server
answers every error with a [Problem](#problem) (`application/problem+json`, RFC 9457) and its HTTP status: for 401, 403,
404, 409, 410, 413 and 422 `detail` says what to change, and `errors` which field; for 429 and 503 the header
`Retry-After` says when to try again. Lists come in pages: pass `next` of an answer as `after` to get the page that
follows. You can send a request again, with the same bytes or the same `Idempotency-Key`: the second one changes
nothing. Times are Unix seconds unless a field says otherwise, digests are
SHA-256 in hexadecimal, `bytes` are base64.
"""


def page() -> str:
    described = document(RESOURCES, version=__version__)
    lines = [HEAD]
    for resource, routes in RESOURCES.items():
        lines += [f"## {resource.replace('_', ' ')}", "", "| operation | who | takes | gives |", "|---|---|---|---|"]
        details = []
        for route in routes:
            path = next(each for each, found in described["paths"].items() if _has(found, route.name))
            operation = described["paths"][path][route.method.lower()]
            who = "anyone" if "anyone" in route.roles else ", ".join(sorted(route.roles))
            takes, gives = (_kind(kind, other) for kind, other in _kinds(route))
            lines.append(f"| `{route.method} {path}` | {who} | {takes} | {gives} |")
            text = f"**{route.method} {path}**: {_text(route.handler.__doc__)}{_query(operation)}"
            details += [_wrap(text), ""]
        lines += ["", *details]
    lines += ["## Messages", ""]
    for name, schema in described["components"]["schemas"].items():
        lines += _message(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _has(operations: dict[str, Any], name: str) -> bool:
    return any(operation["operationId"] == name for operation in operations.values())


def _kinds(route: Any) -> list[tuple[Any, str]]:
    return [(route.request, route.takes), (route.response, route.gives)]


def _kind(kind: Any, other: str) -> str:
    name = getattr(kind, "__name__", "") if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ""
    if name and content_type(kind) == MESSAGEPACK:
        return f"[{name.lower()}](protocol.md#steps) (MessagePack)"
    return f"[{name}](#{name.lower()})" if name else other or ("JSON" if kind is not None else "-")


def _query(operation: dict[str, Any]) -> str:
    found = [each for each in operation["parameters"] if each["in"] != "path"]
    told = ", ".join(f"`{each['name']}` ({each['in']}{', needed' if each['required'] else ''})" for each in found)
    return f" Parameters: {told}." if told else ""


def _message(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if schema.get("description"):
        for paragraph in schema["description"].split("\n\n"):
            lines += [_wrap(_text(paragraph)), ""]
    if schema.get("properties"):
        needed = set(schema.get("required", ()))
        lines += ["| field | type | |", "|---|---|---|"]
        for field, of in schema["properties"].items():
            default = "" if "default" not in of else f"default `{msgspec.json.encode(of['default']).decode()}`"
            lines.append(f"| `{field}` | {_type(of)} | {'needed' if field in needed else default} |")
        lines.append("")
    return lines


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) else "object"
    if schema.get("contentEncoding"):
        return "base64"
    bounds = [f"{word} {schema[key]:,}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    bounds += [f"above {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
    return f"{kind} {' '.join(bounds)}".strip()


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
