"""The API's description as a page for people: the OpenAPI document of this server, rendered without a script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

_FOLDER = Path(__file__).with_name("templates")
_METHODS = ("get", "post", "put", "patch", "delete")


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["json"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    made.filters["type"] = describe_type
    return made


def render(document: Mapping[str, Any]) -> tuple[str, str]:
    """The page of an OpenAPI document, and the Content-Security-Policy that lets it have its style and nothing else."""
    style = (_FOLDER / "api.css").read_text(encoding="utf-8")
    operations: dict[str, list[dict[str, Any]]] = {}
    for path, found in document["paths"].items():
        for method in _METHODS:
            if method in found:
                operation = found[method]
                operations.setdefault(operation["tags"][0], []).append(
                    {**operation, "method": method.upper(), "path": path}
                )
    page = _environment().get_template("api.html").render(
        info=document["info"], operations=operations, schemas=document["components"]["schemas"], style=style
    )  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def describe_type(schema: Mapping[str, Any]) -> str:
    """A JSON Schema in a few words, such as `list of text` or `number above 0`; names of messages as they are."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if "anyOf" in schema:
        return " or ".join(describe_type(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {describe_type(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {describe_type(inner)}" if isinstance(inner, Mapping) else "object"
    if schema.get("contentEncoding") == "base64":
        return "base64"
    words = {"string": "text", "boolean": "true or false", "integer": "whole number"}
    bounds = [("from", "minimum"), ("to", "maximum"), ("above", "exclusiveMinimum"), ("below", "exclusiveMaximum")]
    told = [f"{word} {schema[key]:,}" for word, key in bounds if key in schema]
    return " ".join([words.get(kind, str(kind)), *told])
