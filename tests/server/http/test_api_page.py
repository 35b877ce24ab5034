"""The API for people: an example for each operation that one can write by hand, and a page without a script."""

from __future__ import annotations

import base64
import hashlib
import html
import re

import msgspec
import pytest

from archipel.server.http.api import ROUTES
from archipel.server.http.api_page import describe_type
from archipel.server.http.examples import EXAMPLES
from tests.support.world import World

ROUTE_OF = {route.name: route for routes in ROUTES.values() for route in routes}
# What people send, and what of devices has no signature. By hand: a new operation is to be thought of.
WRITTEN = {
    "challenge", "check_in", "leave", "create_task", "create_model", "register_version", "promote_version",
    "reject_version", "keep_versions", "create_rollout", "create_token", "revoke_enrolment_token",
}  # fmt: skip
SIGNED = {"enrol", "replace_key", "open_session", "advertise", "send_shares", "complain", "confirm", "unmask"}
PACKED = {"join", "neighbours", "deal", "open_envelopes", "include", "answer"}


def test_every_operation_has_an_example_or_a_reason_to_have_none() -> None:
    assert set(EXAMPLES) == WRITTEN
    assert {name for name, route in ROUTE_OF.items() if route.request is not None} == WRITTEN | SIGNED | PACKED


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_an_example_is_what_the_operation_takes(name: str) -> None:
    kind = ROUTE_OF[name].request
    assert kind is not None
    decoded = msgspec.json.decode(msgspec.json.encode(EXAMPLES[name]), type=kind)
    # All of it was read, and nothing of it is the default anyway.
    assert msgspec.to_builtins(decoded).keys() >= EXAMPLES[name].keys()


def test_the_description_has_them_and_where_the_server_is(world: World) -> None:
    described = world.app.test_client().get("/v1/openapi.json").get_json()
    assert described["servers"] == [{"url": "/", "description": "this server"}]
    body = described["paths"]["/v1/tasks"]["post"]["requestBody"]["content"]["application/json"]
    assert body["example"]["cohort"] == 30


def test_the_page_has_every_operation_and_no_link_leads_nowhere(world: World) -> None:
    client = world.app.test_client()
    response = client.get("/api/")
    page = response.get_data(as_text=True)
    assert (response.status_code, response.mimetype) == (200, "text/html")
    assert '<a href="/api/">' in client.get("/").get_data(as_text=True)
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(ids) >= ROUTE_OF.keys() - {"show_description"}
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert len(links) > 50
    assert links <= set(ids)
    assert html.escape('"eligibility": "charging and ram >= 512MiB"') in page.replace("&#34;", "&quot;")
    # Nothing is loaded, and nothing runs but the style that the policy names by its digest.
    assert not re.search(r"<script|src=|@import|url\(|style=", page)
    [style] = re.findall("<style>(.*?)</style>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["Content-Security-Policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#/components/schemas/TaskInfo"}, "TaskInfo"),
        ({"type": "array", "items": {"type": "string"}}, "list of text"),
        ({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2000}, {"type": "null"}]},
         "whole number from 1 to 2,000 or null"),
        ({"enum": ["a", "b"]}, '"a" or "b"'),
        ({"const": True}, "true"),
        ({"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}},
         "object of number above 0"),
        ({"type": "object"}, "object"),
        ({"type": "string", "contentEncoding": "base64"}, "base64"),
        ({}, "anything"),
    ],
)  # fmt: skip
def test_a_type_in_a_few_words(schema: dict[str, object], said: str) -> None:
    assert describe_type(schema) == said
