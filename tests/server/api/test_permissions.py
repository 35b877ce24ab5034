"""Who may call what: every route of the table with every role, and nothing outside the table."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from archipel.server import pages
from archipel.server.api import ROUTES

TABLE = [route for routes in (*ROUTES.values(), pages.routes()) for route in routes]
CALLERS = ("nobody", "stranger", "wrong scheme", "revoked", "device", "operator", "auditor", "admin", "root")


def concrete(path: str, round_id: str = "0" * 32) -> str:
    path = path.replace("<id:round_id>", round_id).replace("<name:name>", "nobody").replace("<number:number>", "1")
    return re.sub(r"<id:\w+>", "0" * 32, re.sub(r"<digest:\w+>", "0" * 64, path))


def headers(world: Any, caller: str) -> dict[str, str]:
    tokens = {
        "stranger": "Bearer " + "x" * 43,
        "wrong scheme": f"Basic {world.operator_token}",
        "root": f"Bearer {world.operator_token}",
    }
    if caller in ("operator", "auditor", "admin", "revoked"):
        role = "admin" if caller == "revoked" else caller
        made = world.operator("POST", "/v1/tokens", {"name": caller, "role": role})[1]
        if caller == "revoked":
            assert world.operator("POST", f"/v1/tokens/{made['info']['token_id']}/revoke")[0] == 200
        return {"Authorization": f"Bearer {made['token']}"}
    if caller == "device":
        (device,) = world.devices or world.add_devices(1)
        return {"Authorization": f"Bearer {device.token}"}
    return {"Authorization": tokens[caller]} if caller in tokens else {}


@pytest.mark.parametrize("caller", CALLERS)
def test_every_route_with_every_role(world: Any, caller: str) -> None:
    sent = headers(world, caller)
    for route in TABLE:
        path = concrete(route.path)
        with (
            world.app.test_client() as client,
            client.open(path, method=route.method, headers=sent, data=b"{}") as response,
        ):
            where = f"{caller}: {route.method} {route.path} -> {response.status_code} {response.get_data()[:200]!r}"
        if "anyone" in route.roles:
            assert response.status_code not in (401, 500), where
            assert (response.status_code == 403) <= (route.path == "/v1/devices"), where
        elif caller in ("nobody", "stranger", "wrong scheme", "revoked"):
            assert response.status_code == 401, where
            assert response.headers["WWW-Authenticate"] == "Bearer"
        elif {"root": "admin"}.get(caller, caller) in route.roles:
            # Allowed in; the made-up ids and the empty body then lead to other errors, but never to these.
            assert response.status_code not in (401, 403, 500), where
        else:
            assert response.status_code == 403, where


MEMBERS = [route for route in TABLE if route.members]


def test_the_table_marks_all_routes_of_a_round() -> None:
    of_devices = {route.path for route in TABLE if "/v1/rounds/" in route.path and "device" in route.roles}
    assert of_devices == {route.path for route in MEMBERS}


def test_a_device_that_is_not_in_the_round_gets_nothing(world: Any) -> None:
    world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    (outsider,) = world.add_devices(1)
    valid = {
        "advertise": {"advertisement": {"body": "", "signature": ""}, "envelope_keys": ""},
        "send_shares": {"shares": []},
        "complain": {"complaints": []},
        "confirm": {"confirmation": {"body": "", "signature": ""}},
        "unmask": {"self_seeds": [], "mask_keys": []},
    }
    for route in MEMBERS:
        body = msgspec.json.encode(valid[route.name]) if route.name in valid else b"\0" * 27
        digest = {"Digest-SHA256": "0" * 64}
        path = concrete(route.path, devices[0].plan.round_id)
        status, answer = outsider.call(route.method, path, body, digest)
        assert (status, answer["type"]) == (403, "forbidden"), route
        status, answer = devices[0].call(route.method, path, body, digest)
        assert status != 403, route


def test_the_application_has_the_routes_of_the_table_and_no_others(world: Any) -> None:
    made = {(method, rule.rule) for rule in world.app.url_map.iter_rules() for method in rule.methods - {"HEAD"}}
    assert made == {(route.method, route.path) for route in TABLE}


def test_every_route_says_what_it_does() -> None:
    assert all(route.summary.endswith(".") or ";" in route.summary for route in TABLE)
    names = [route.name for route in TABLE]
    assert len(names) == len(set(names))
