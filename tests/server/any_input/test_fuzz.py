"""Bodies from outside: whatever arrives, the answer is a 4xx in the one error shape, never a 5xx."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.protocol.messages import Problem
from archipel.server.api import ROUTES
from tests.server.conftest import NO_LIMITS
from tests.server.registry.fleet import MODEL, Fleet

CORPUS = Path(__file__).parent / "corpus"
TABLE = {route.name: route for routes in ROUTES.values() for route in routes if route.request is not None}
CASES = 150
OTHER_VALUES = (None, True, 0, -1, 1e308, 2**70, "", "x" * 5000, "\ud83d\ude00", [], {}, [[]], "0" * 32, "0" * 64)


@pytest.fixture
def server_settings() -> dict[str, Any]:
    return NO_LIMITS


def mutations(seed: bytes, generator: random.Random) -> Any:
    """Endlessly: broken bytes, and well-formed JSON with something else in one place."""
    while True:
        if generator.random() < 0.5:
            data = bytearray(seed)
            for _ in range(generator.randint(1, 4)):
                start = generator.randrange(len(data) + 1)
                stop = min(len(data), start + generator.randint(0, 8))
                data[start:stop] = generator.randbytes(generator.randint(0, 8))
            yield bytes(data)
        else:
            document = json.loads(seed)
            place, key = document, None
            while isinstance(place, dict | list) and place and (key is None or generator.random() < 0.7):
                parent = place
                key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
                place = parent[key]
            if key is not None:
                parent[key] = generator.choice(OTHER_VALUES)
            yield json.dumps(document).encode()


def test_the_corpus_has_every_route_that_takes_a_body() -> None:
    assert {path.stem for path in CORPUS.glob("*.json")} == set(TABLE)


@pytest.mark.parametrize("caller", ["device", "admin"])
def test_no_body_makes_the_server_fail(world: Any, caller: str) -> None:
    Fleet(world).create()
    world.create_task(cohort=4)
    devices = world.add_devices(4)
    world.start_round(devices)
    tokens = {"device": devices[0].token, "admin": world.operator_token}
    headers = {"Authorization": f"Bearer {tokens[caller]}"}
    generator = random.Random(20)
    with world.app.test_client() as client:
        for name, route in TABLE.items():
            if caller not in route.roles:
                continue
            path = route.path.replace("<id:round_id>", devices[0].plan.round_id)
            path = path.replace("<id:device_id>", devices[0].id)
            path = path.replace("<name:name>", MODEL).replace("<number:number>", "2")
            seed = (CORPUS / f"{name}.json").read_bytes()
            source = mutations(seed, generator)
            for body in [seed, *(next(source) for _ in range(CASES))]:
                response = client.open(path, method=route.method, data=body, headers=headers)
                where = f"{name}: {body[:200]!r} -> {response.status_code} {response.get_data()!r}"
                assert response.status_code < 500, where
                assert response.status_code != 429, where
                if response.status_code >= 400:
                    msgspec.json.decode(response.get_data(), type=Problem)
                else:
                    msgspec.json.decode(response.get_data(), type=route.response)
