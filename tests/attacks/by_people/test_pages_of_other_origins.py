"""A page that somebody else wrote asks the server from a visitor's browser.

Who: whoever has people open a page, such as an operator whose network reaches a server that the page's author cannot
reach. What they want: to read the server's answers. What stops them: a browser hands a page the answer of another
origin only where that origin allows it, which this server does for the origins that its operator has listed, and on no
route that only operators use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest
from werkzeug.test import Client

from archipel.server.app import create_app
from tests.server.http.matrix import MATRIX
from tests.server.http.test_permissions import concrete
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World

LISTED = "https://app.example"
OTHERS = (
    f"{LISTED}:8443", "http://app.example", "https://app.example.evil", "https://evil.app.example", f"{LISTED}/",
    "https://APP.example", "null", "",
)  # fmt: skip
FOR_DEVICES = [line for line in MATRIX if line.device != "-" and line.path.startswith("/v1/")]
FOR_OTHERS = [line for line in MATRIX if line not in FOR_DEVICES]


def client_of(place: World, allowed: Sequence[str]) -> Iterator[Client]:
    app = create_app(msgspec.structs.replace(place.settings, allowed_origins=tuple(allowed)), clock=place.clock)
    yield app.test_client()
    app.extensions["archipel"].database.dispose()


@pytest.fixture
def client(world: World) -> Iterator[Client]:  # noqa: F811
    yield from client_of(world, [LISTED])


def reads(client: Client, origin: str, method: str, path: str, **shown: str) -> list[str]:
    """Which requests a browser makes for the page and hands it the answers of, by the Fetch standard's CORS check:
    a plain one, and one with a token, before which the browser asks."""
    asked = client.options(
        path, headers={"Origin": origin, "Access-Control-Request-Method": method,
                       "Access-Control-Request-Headers": "authorization"},
    )  # fmt: skip
    sent = client.open(path, method=method, headers={"Origin": origin, **shown})
    found = [] if sent.headers.get("Access-Control-Allow-Origin") not in (origin, "*") else ["plain"]
    if asked.status_code == 204 and asked.headers.get("Access-Control-Allow-Origin") in (origin, "*"):
        found.append("with a token")
    # Cookies and client certificates of the visitor are for nobody.
    for answer in (asked, sent):
        assert "Access-Control-Allow-Credentials" not in answer.headers
    return found


@pytest.mark.sampled(every=3)
def test_the_page_on_the_list_reads_what_devices_use(client: Client) -> None:
    """What the other tests rely on: here a browser hands out the answer."""
    for line in FOR_DEVICES:
        assert reads(client, LISTED, line.method, concrete(line.path)) == ["plain", "with a token"], line.route


@pytest.mark.parametrize("origin", OTHERS)
@pytest.mark.sampled(every=6)
def test_pages_that_are_not_on_the_list_read_nothing(client: Client, origin: str) -> None:
    for line in MATRIX:
        assert reads(client, origin, line.method, concrete(line.path)) == [], line.route


@pytest.mark.sampled(every=3)
def test_a_server_without_a_list_answers_no_other_origin(world: World) -> None:  # noqa: F811
    for client in client_of(world, []):
        for line in MATRIX:
            assert reads(client, LISTED, line.method, concrete(line.path)) == [], line.route


@pytest.mark.sampled(every=3)
def test_the_page_on_the_list_reads_nothing_on_the_routes_of_operators(client: Client) -> None:
    assert len(FOR_OTHERS) > 40
    for line in FOR_OTHERS:
        path = concrete(line.path)
        assert reads(client, LISTED, line.method, path) == [], line.route
        # Nor by a request that claims to be a browser's question about another method: POST /v1/devices enrols.
        claimed = {"Access-Control-Request-Method": "POST"}
        assert reads(client, LISTED, line.method, path, **claimed) == [], line.route
    for path in ("/v1/nothing", "/v1/tasks/x/y"):
        assert reads(client, LISTED, "GET", path) == []


def test_a_cache_keeps_the_answers_of_origins_apart(client: Client) -> None:
    for origin in (LISTED, *OTHERS):
        assert client.get("/v1/health", headers={"Origin": origin}).headers["Vary"] == "Origin"
