"""Bodies from outside: whatever arrives, the answer is a 4xx in the one error shape, never a 5xx."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from archipel.protocol.messages import Problem
from archipel.server.http.api import ROUTES
from archipel.server.http.routes import MESSAGEPACK, content_type
from tests.mutations import mutations
from tests.support.fleet import MODEL, Fleet
from tests.support.world import NO_LIMITS, World

CORPUS = Path(__file__).parent / "corpus"
TABLE = {route.name: route for routes in ROUTES.values() for route in routes if route.request is not None}
CASES = 150


def body_of(name: str) -> Path:
    """The file with a body of the route."""
    return CORPUS / f"{name}.{'msgpack' if content_type(TABLE[name].request) == MESSAGEPACK else 'json'}"


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return NO_LIMITS


def test_the_corpus_has_every_route_that_takes_a_body() -> None:
    assert {path.name for path in CORPUS.iterdir() if path.is_file()} == {body_of(name).name for name in TABLE}


@pytest.mark.parametrize("name", TABLE)
def test_mutations_begin_at_what_the_route_reads(name: str) -> None:
    """A body of the right form: of another one no mutation would get beyond decoding."""
    path = body_of(name)
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.msgpack.decode
    decode(path.read_bytes(), type=TABLE[name].request)


@pytest.mark.parametrize("caller", ["device", "admin"])
@pytest.mark.sampled(every=8)
def test_no_body_makes_the_server_fail(world: World, caller: str) -> None:
    Fleet(world).create()
    world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    tokens = {"device": devices[0].token, "admin": world.operator_token}
    headers = {"Authorization": f"Bearer {tokens[caller]}"}
    generator = random.Random(20)
    with world.app.test_client() as client:
        # Leaving comes last: who has left is refused everything else.
        for name, route in sorted(TABLE.items(), key=lambda item: item[0] == "leave"):
            if caller not in route.roles:
                continue
            path = route.path.replace("<id:round_id>", devices[0].plan.round_id)
            path = path.replace("<id:device_id>", devices[0].id)
            path = path.replace("<name:name>", MODEL).replace("<number:number>", "2")
            seed = body_of(name).read_bytes()
            source = mutations(seed, generator, packed=body_of(name).suffix == ".msgpack")
            for body in [seed, *(next(source) for _ in range(CASES))]:
                response = client.open(path, method=route.method, data=body, headers=headers)
                where = f"{name}: {body[:200]!r} -> {response.status_code} {response.get_data()!r}"
                assert response.status_code < 500, where
                assert response.status_code != 429, where
                if response.status_code >= 400:
                    msgspec.json.decode(response.get_data(), type=Problem)
                elif response.mimetype == "application/json":
                    msgspec.json.decode(response.get_data(), type=route.response)
