"""Access tokens: shown once, kept as hashes, for some populations, until they expire or are revoked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from archipel.server.database.server_tables import AccessToken
from archipel.server.http.auth import NOT_VALID
from tests.support.world import World


def make(world: World, **settings: Any) -> tuple[dict[str, Any], dict[str, str]]:
    status, made = world.operator("POST", "/v1/tokens", {"name": "shift", "role": "operator", **settings})
    assert status == 201, made
    return made, {"Authorization": f"Bearer {made['token']}"}


@pytest.mark.sampled(every=3)
def test_a_token_is_shown_once_and_nowhere_else(world: World) -> None:
    made, headers = make(world)
    assert made["token"].startswith("apt_")
    assert world.operator("GET", "/v1/tasks", headers=headers)[0] == 200
    shown = world.operator("GET", "/v1/tokens")[1]["items"]
    assert shown == [made["info"]]
    folder = Path(world.settings.folder)
    secret = made["token"].encode()
    for path in folder.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path
    with world.services.database.read() as session:
        [kept] = session.scalars(select(AccessToken.token_hash))
    assert kept == hashlib.sha256(secret).digest()
    assert made["token"] not in repr(made["info"])


@pytest.mark.sampled(every=3)
def test_a_revoked_token_is_worth_nothing_at_once(world: World) -> None:
    made, headers = make(world)
    path = f"/v1/tokens/{made['info']['token_id']}/revoke"
    assert world.operator("GET", "/v1/tasks", headers=headers)[0] == 200
    first = world.operator("POST", path)[1]
    assert first["revoked"] == world.clock.now
    assert world.operator("GET", "/v1/tasks", headers=headers)[0] == 401
    world.clock.now += 5
    assert world.operator("POST", path) == (200, first)
    assert world.operator("POST", f"/v1/tokens/{'0' * 32}/revoke")[0] == 404


def test_a_token_expires(world: World) -> None:
    _, headers = make(world, seconds=60)
    world.clock.now += 59
    assert world.operator("GET", "/v1/tasks", headers=headers)[0] == 200
    world.clock.now += 1
    assert world.operator("GET", "/v1/tasks", headers=headers)[0] == 401


def test_a_token_is_for_its_populations(world: World) -> None:
    mine = world.create_task()
    theirs = world.create_task(population="teachers")
    _, headers = make(world, populations=["pupils"])
    listed = world.operator("GET", "/v1/tasks", headers=headers)[1]["items"]
    assert [each["task_id"] for each in listed] == [mine["task_id"]]
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/rounds")):
        assert world.operator(method, f"/v1/tasks/{mine['task_id']}{path}", headers=headers)[0] == 200
        status, answer = world.operator(method, f"/v1/tasks/{theirs['task_id']}{path}", headers=headers)
        assert (status, answer["detail"]) == (404, f"no task {theirs['task_id']}")
    values = {
        "name": "x", "population": "teachers", "rounds": 1, "min_cohort": 3, "cohort": 5, "bundle": mine["bundle"],
    }  # fmt: skip
    assert world.operator("POST", "/v1/tasks", values, headers)[0] == 403
    assert world.task(theirs["task_id"])["state"] == "running"


@pytest.mark.sampled(every=3)
def test_a_token_for_one_population_sees_nothing_of_others(world: World) -> None:
    world.create_task(population="pupils", cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    path = f"/v1/rounds/{devices[0].plan.round_id}"
    _, mine = make(world, populations=["pupils"])
    _, other = make(world, populations=["teachers"], role="auditor")
    assert world.operator("GET", path, headers=mine)[0] == 200
    assert world.operator("GET", path, headers=other)[0] == 404
    # The audit log only makes sense as a whole, and tells of all.
    for route in ("/v1/audit", "/v1/audit/head"):
        assert world.operator("GET", route, headers=other)[0] == 403
    _, whole = make(world, role="auditor")
    assert world.operator("GET", "/v1/audit", headers=whole)[0] == 200


def test_an_admin_is_one_for_all_populations(world: World) -> None:
    """Or it would make itself a token for those that it was not given."""
    status, answer = world.operator("POST", "/v1/tokens", {"name": "half", "role": "admin", "populations": ["pupils"]})
    assert status == 422, answer


def test_words_that_fit_whoever_asks(world: World) -> None:
    """Of a token that nobody knows it is not known whose it was meant to be."""
    made, revoked = make(world)
    world.operator("POST", f"/v1/tokens/{made['info']['token_id']}/revoke")
    wrong = [revoked, *({"Authorization": f"Bearer {token}"} for token in ("apt_guess", world.operator_token[:-1]))]
    for headers in wrong:
        for method, path in (("GET", "/v1/tasks"), ("POST", "/v1/check-ins")):
            status, answer = world.operator(method, path, {}, headers=headers)
            assert status == 401
            assert answer["detail"] == NOT_VALID
