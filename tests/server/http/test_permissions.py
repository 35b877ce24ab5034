"""Who may call what: every route with every role, against the table in matrix.py, which is written by hand."""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
import pytest
from werkzeug.datastructures import Headers

from archipel.protocol import identity
from archipel.server.database.tables import Blob
from archipel.server.http import pages
from archipel.server.http.api import ROUTES
from tests.server.http.matrix import MATRIX, Line
from tests.support.devices import POPULATION, START
from tests.support.fleet import MODEL, STAGES, Fleet
from tests.support.world import World

TABLE = [route for routes in (*ROUTES.values(), pages.routes(resources=ROUTES)) for route in routes]
NOBODY = ("no token", "stranger", "wrong scheme", "revoked token", "expired token", "revoked device", "old session")
CALLERS = (*NOBODY, "device", "operator", "analyst", "auditor", "admin", "root")
OTHER = "teachers"


def concrete(path: str, **known: str) -> str:
    """The path with these ids in it; those of nothing for the others."""
    path = re.sub(r"<\w+:(\w+)>", lambda match: known.get(match[1], match[0]), path)
    path = path.replace("<name:name>", "nobody").replace("<number:number>", "1").replace("<path:name>", "x")
    return re.sub(r"<id:\w+>", "0" * 32, re.sub(r"<digest:\w+>", "0" * 64, path))


def access_token(world: World, role: str, **settings: Any) -> dict[str, Any]:
    status, made = world.operator("POST", "/v1/tokens", {"name": "test", "role": role, **settings})
    assert status == 201, made
    return made


def headers(world: World, caller: str) -> dict[str, str]:
    """What that caller shows, made in a way that the caller could have come by it."""
    if caller == "no token":
        return {}
    if caller == "wrong scheme":
        return {"Authorization": f"Basic {world.operator_token}"}
    if caller == "stranger":
        token = "x" * 43
    elif caller == "root":
        token = world.operator_token
    elif caller in ("device", "revoked device", "old session"):
        (device,) = world.add_devices(1)
        token = device.token
        if caller == "revoked device":
            assert world.operator("POST", f"/v1/devices/{device.id}/revoke")[0] == 200
        elif caller == "old session":
            world.clock.now += world.settings.session_seconds
    else:
        made = access_token(world, "admin" if caller.endswith("token") else caller, seconds=60)
        token = made["token"]
        if caller == "revoked token":
            assert world.operator("POST", f"/v1/tokens/{made['info']['token_id']}/revoke")[0] == 200
        elif caller == "expired token":
            world.clock.now += 60
    return {"Authorization": f"Bearer {token}"}


def send(world: World, method: str, path: str, body: bytes, shown: dict[str, str]) -> tuple[int, bytes, Headers]:
    with world.app.test_client() as client, client.open(path, method=method, headers=shown, data=body) as answer:
        return answer.status_code, answer.get_data(), answer.headers


def test_the_server_has_the_routes_of_the_matrix_and_no_others(world: World) -> None:
    # Those of the dashboard have a table of their own: tests/server/dashboard/matrix.py.
    rules = [rule for rule in world.app.url_map.iter_rules() if not rule.rule.startswith("/dashboard")]
    made = {f"{method} {rule.rule}" for rule in rules for method in rule.methods - {"HEAD"}}
    written = [line.route for line in MATRIX]
    assert made == set(written), "add the route to tests/server/http/matrix.py, with who may call it"
    assert len(written) == len(set(written))
    assert made == {f"{route.method} {route.path}" for route in TABLE}


def test_every_cell_is_one_of_the_words() -> None:
    for line in MATRIX:
        assert {line.nobody, line.operator, line.analyst, line.auditor, line.admin} <= {"yes", "-"}, line
        assert line.device in ("yes", "-", "member"), line
        assert line.elsewhere in ("yes", "-", "none", "hidden"), line


@pytest.mark.parametrize("caller", CALLERS)
def test_every_route_with_every_role(world: World, caller: str) -> None:
    shown = headers(world, caller)
    column = "nobody" if caller in NOBODY else {"root": "admin"}.get(caller, caller)
    for line in MATRIX:
        status, answer, sent = send(world, line.method, concrete(line.path), b"{}", shown)
        where = f"{caller}: {line.route} -> {status} {answer[:200]!r}"
        if getattr(line, column) != "-":
            # Let in; the made-up ids and the empty body then lead to other errors, but never to these.
            assert status not in (401, 500), where
            assert status != 403 or line.route == "POST /v1/devices", where  # a device without an enrolment token
        elif column == "nobody":
            assert status == 401, where
            assert sent["WWW-Authenticate"] == "Bearer", where
        else:
            assert status == 403, where


def test_what_anybody_may_ask_tells_nothing_of_devices_tasks_and_models(world: World) -> None:
    """The other side of `yes` for nobody."""
    (device,) = world.add_devices(1)
    Fleet(world).create(1)
    task = world.create_task(name="hush-3141", population="hermits")
    for line in MATRIX:
        if line.nobody == "yes":
            _, answer, _ = send(world, line.method, concrete(line.path, device_id=device.id), b"{}", {})
            for secret in (device.id, task["task_id"], task["bundle"], "hush-3141", "hermits"):
                assert secret.encode() not in answer, (line.route, secret)


VALID = {
    "PUT /v1/rounds/<id:round_id>/advertisement": {"advertisement": {"body": "", "signature": ""}, "envelope_keys": ""},
    "PUT /v1/rounds/<id:round_id>/complaints": {"complaints": []},
    "POST /v1/rounds/<id:round_id>/leave": {},
    "PUT /v1/rounds/<id:round_id>/shares": {"shares": []},
    "PUT /v1/rounds/<id:round_id>/confirmation": {"confirmation": {"body": "", "signature": ""}},
    "PUT /v1/rounds/<id:round_id>/unmasking": {"self_seeds": [], "mask_keys": []},
}
SEALED = {"body": b"", "signature": b""}
PACKED = {
    "PUT /v1/rounds/<id:round_id>/member": [{"token": SEALED, "identity": SEALED}, bytes(96), bytes(64)],
    "POST /v1/rounds/<id:round_id>/neighbours": [[0]],
    "PUT /v1/rounds/<id:round_id>/dealt": [[0], b""],
    "PUT /v1/rounds/<id:round_id>/refused": [[]],
    "PUT /v1/rounds/<id:round_id>/inclusions": [b""],
    "PUT /v1/rounds/<id:round_id>/answer": [b"", b"", bytes(64)],
}
"""Bodies that are decoded; whether the caller is in the round is looked at after that."""


def test_a_device_that_is_not_in_the_round_gets_nothing(world: World) -> None:
    world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    (outsider,) = world.add_devices(1)
    of_members = [line for line in MATRIX if line.device == "member"]
    assert len(of_members) == len([line for line in MATRIX if "/v1/rounds/" in line.path and line.device != "-"])
    # Leaving comes last, for who has left is not in the round any more.
    for line in sorted(of_members, key=lambda each: each.path.endswith("/leave")):
        body = msgspec.json.encode(VALID[line.route]) if line.route in VALID else b"\0" * 27
        body = msgspec.msgpack.encode(PACKED[line.route]) if line.route in PACKED else body
        digest = {"Digest-SHA256": "0" * 64}
        path = concrete(line.path, round_id=devices[0].plan.round_id)
        status, answer = outsider.call(line.method, path, body, digest)
        assert status == 403, (answer, line)
        status, answer = devices[0].call(line.method, path, body, digest)
        assert status != 403, (line, answer)


class Town:
    """Something of every kind that belongs to population `pupils`: ids by their name in paths, bodies by route."""

    def __init__(self, world: World) -> None:
        self.world = world
        fleet = Fleet(world).create()
        rollout = fleet.begin(gate="none")
        task = world.create_task(cohort=3)
        devices = world.add_devices(4)
        world.start_round(devices[:3])
        with world.services.database.read() as session:
            blob = session.query(Blob.digest).filter(Blob.kind == "weights").first()
        certificate = self.certificate()
        assert world.operator("POST", "/v1/enrolment-tokens/revoke", {"certificate": self.certificate()})[0] == 200
        self.token_id = access_token(world, "auditor", populations=[POPULATION])["info"]["token_id"]
        self.ids = {
            "round_id": devices[0].plan.round_id, "task_id": task["task_id"], "rollout_id": rollout["rollout_id"],
            "device_id": devices[3].id, "token_id": self.token_id, "number": "2",
        }  # fmt: skip
        self.digests = {"bundles": task["bundle"], "blobs": blob.digest}
        self.bodies: dict[str, dict[str, object]] = {
            "POST /v1/enrolment-tokens/revoke": {"certificate": certificate},
            "POST /v1/tasks": {
                "name": "more", "population": POPULATION, "rounds": 1, "min_cohort": 3, "cohort": 5,
                "bundle": task["bundle"],
            },
            "POST /v1/models": {"name": "letters", "population": POPULATION},
            "POST /v1/models/<name:name>/retention": {"keep_versions": 3},
            "POST /v1/models/<name:name>/versions": {"bundle": fleet.bundles[0]},
            "POST /v1/models/<name:name>/versions/<number:number>/reject": {"reason": "a test"},
            "POST /v1/models/<name:name>/promote": {"version": 2},
            "POST /v1/rollouts": {"model": MODEL, "version": 2, "stages": STAGES, "gate": "none"},
            "POST /v1/tokens": {"name": "mine", "role": "auditor"},
        }  # fmt: skip

    def certificate(self) -> dict[str, Any]:
        """Of an enrolment token that nobody has used."""
        key, seed = self.world.keys.enrolment, secrets.token_bytes(32)
        return msgspec.to_builtins(
            identity.mint_token(key, population=POPULATION, not_after=int(START + 1e6), seed=seed, kind="device")
        )

    def call(self, line: Line, shown: dict[str, str]) -> tuple[int, bytes]:
        name = POPULATION if line.path.startswith("/v1/populations") else MODEL
        digest = self.digests.get(line.path.split("/")[2], "") if line.path.count("/") > 2 else ""
        path = concrete(line.path, **self.ids, name=name, **({"digest": digest} if digest else {}))
        if line.route == "POST /v1/bundles":
            body = self.world.bundle_file.read_bytes()
        else:
            body = msgspec.json.encode(self.bodies[line.route]) if line.route in self.bodies else b""
        return send(self.world, line.method, path, body, shown)[:2]

    def changes(self) -> list[dict[str, Any]]:
        """What the audit log holds of this; refusals are counted there besides."""
        status, answer = self.world.operator("GET", "/v1/audit?limit=500")
        assert status == 200
        return [entry for entry in answer["items"] if entry["action"] not in ("access.refused", "session.open")]


@pytest.mark.parametrize("role", ["operator", "analyst", "auditor"])
def test_a_token_for_another_population_sees_and_changes_nothing_of_this_one(world: World, role: str) -> None:
    town = Town(world)
    shown = {"Authorization": f"Bearer {access_token(world, role, populations=[OTHER])['token']}"}
    before = town.changes()
    # Last: from then on the bundle is theirs, too.
    for line in sorted(MATRIX, key=lambda each: each.route == "POST /v1/bundles"):
        if line.nobody == "yes":
            continue
        status, answer = town.call(line, shown)
        where = f"{role} of {OTHER}: {line.route} -> {status} {answer[:200]!r}"
        if getattr(line, role) == "-" or line.elsewhere == "-":
            assert status == 403, where
        elif line.elsewhere == "none":
            assert status == 200, where
            assert msgspec.json.decode(answer)["items"] == [], where
        else:
            # 422: what the request's body names is not there.
            assert status in ((404, 422) if line.elsewhere == "hidden" else (200, 201)), where
    made = [entry for entry in town.changes()[len(before) :] if entry["action"] != "bundle.publish"]
    assert [entry["action"] for entry in made] == []  # but the bundle that it uploads for its own


@pytest.mark.parametrize("role", ["operator", "auditor"])
def test_a_token_for_this_population_is_let_in(world: World, role: str) -> None:
    """So that what is refused above is refused for its population, and not because there is nothing."""
    town = Town(world)
    shown = {"Authorization": f"Bearer {access_token(world, role, populations=[POPULATION])['token']}"}
    of_all = ("GET /v1/audit", "GET /v1/audit/head")
    # Only secure rounds that were committed have one: tests/attacks/by_server/test_crafted_weights.py.
    of_none = "GET /v1/populations/<name:name>/weights-log/<digest:digest>/<number:number>/endorsement"
    for line in MATRIX:
        if line.nobody == "yes" or getattr(line, role) == "-" or line.route in (*of_all, of_none):
            continue
        status, answer = town.call(line, shown)
        where = f"{role} of {POPULATION}: {line.route} -> {status} {answer[:200]!r}"
        assert status in (200, 201, 409), where
        if line.elsewhere == "none":
            assert msgspec.json.decode(answer)["items"], where


def test_every_route_says_what_it_does() -> None:
    assert all(route.summary.endswith(".") or ";" in route.summary for route in TABLE)
    names = [route.name for route in TABLE]
    assert len(names) == len(set(names))
