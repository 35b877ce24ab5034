"""Pages of other origins: those on the list may be devices.

tests/attacks/by_people/test_pages_of_other_origins.py has the pages that are not on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from werkzeug.test import Client

from archipel.server import load_settings
from archipel.server.app import create_app
from tests.support.world import World

PAGE = "https://app.example"
ROUND = "/v1/rounds/" + "0" * 32
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    """Of the server with one allowed origin."""
    app = create_app(msgspec.structs.replace(world.settings, allowed_origins=(PAGE,)), clock=world.clock)
    yield app.test_client()
    app.extensions["archipel"].database.dispose()


def of_cors(headers: object) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("Access-Control-")}  # type: ignore[attr-defined]


@pytest.mark.sampled(every=3)
def test_a_page_on_the_list_is_answered(client: Client) -> None:
    asked = client.options("/v1/check-ins", headers={"Origin": PAGE, **PREFLIGHT})
    assert (asked.status_code, asked.get_data()) == (204, b"")
    assert of_cors(asked.headers) == {
        "Access-Control-Allow-Origin": PAGE,
        "Access-Control-Allow-Methods": "POST",
        "Access-Control-Allow-Headers": "Authorization, Content-Type, Digest-SHA256, Range",
        "Access-Control-Expose-Headers": "Content-Range, Date, Retry-After, X-Request-Id",
        "Access-Control-Max-Age": "7200",
    }
    # Errors, too: a device must be able to read why it was refused, and when to come again.
    refused = client.post("/v1/check-ins", json={}, headers={"Origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["Access-Control-Allow-Origin"] == PAGE
    assert refused.headers["Vary"] == "Origin"
    assert "Access-Control-Allow-Credentials" not in refused.headers


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_the_messages_of_a_round(client: Client, method: str) -> None:
    path = ROUND if method == "GET" else f"{ROUND}/update"
    asked = client.options(path, headers={"Origin": PAGE, "Access-Control-Request-Method": method})
    assert (asked.status_code, asked.headers["Access-Control-Allow-Methods"]) == (204, method)


@pytest.mark.parametrize("wrong", ["*", "https://app.example/", "app.example", "https://*.example", "https://a b"])
def test_a_list_that_is_none(world: World, wrong: str) -> None:
    with pytest.raises(Exception, match="allowed_origins"):
        load_settings(world.settings.folder, environment={"ARCHIPEL_SERVER_ALLOWED_ORIGINS": wrong})


def test_the_list_from_the_environment(world: World) -> None:
    environment = {"ARCHIPEL_SERVER_ALLOWED_ORIGINS": f"{PAGE},http://localhost:5173"}
    settings = load_settings(world.settings.folder, environment=environment)
    assert settings.allowed_origins == (PAGE, "http://localhost:5173")
