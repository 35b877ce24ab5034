"""Versions by content and with their lineage; what is promoted, and the way back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from archipel.bundle import Lineage, read_weights
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import POPULATION
from tests.support.fleet import MODEL, Fleet
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World


@pytest.fixture
def empty(world: World) -> Fleet:
    return Fleet(world).create(0, promote=None)


def train(world: World, rounds: int, bundle: str) -> dict[str, Any]:
    task = world.create_task(bundle=bundle, privacy="plain", threshold=None, cohort=3, rounds=rounds)
    devices = world.add_devices(3)
    for _ in range(rounds):
        world.clock.now += 1
        world.start_round(devices)
        for index, device in enumerate(devices):
            device.updating(**update(index))
        world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    return task


def versions(fleet: Fleet) -> list[dict[str, Any]]:
    return list(fleet.get(f"models/{MODEL}/versions")["items"])


def test_a_digest_is_what_the_documentation_says(world: World, empty: Fleet) -> None:
    made = empty.add_version()
    text = json.dumps({"bundle": made["bundle"], "weights": None}, sort_keys=True, separators=(",", ":"))
    assert made["digest"] == hashlib.sha256(text.encode()).hexdigest()
    assert (made["number"], made["state"], made["parent"], made["task_id"], made["downloaded"]) == (
        1, "registered", None, None, 0,
    )  # fmt: skip


@pytest.mark.sampled(every=3)
def test_the_same_content_is_the_same_version(world: World, empty: Fleet) -> None:
    first = empty.add_version()
    world.clock.now += 5
    assert empty.post(f"models/{MODEL}/versions", {"bundle": first["bundle"]}, 200) == first
    # Version 0 of a training task holds what its bundle holds.
    task = train(world, 1, first["bundle"])
    asked = {"task_id": task["task_id"], "task_version": 0}
    assert empty.post(f"models/{MODEL}/versions", asked, 200) == first
    second = empty.post(f"models/{MODEL}/versions", {"task_id": task["task_id"]}, 201)
    assert (second["number"], second["task_version"]) == (2, 1)
    assert empty.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": 1}, 200) == second
    assert [each["number"] for each in versions(empty)] == [2, 1]
    assert empty.model()["newest"] == 2


@pytest.mark.sampled(every=3)
def test_lineage_of_training(world: World, empty: Fleet) -> None:
    bundle = empty.add_version()["bundle"]
    task = train(world, 3, bundle)
    rounds = world.rounds(task["task_id"])
    third = empty.post(f"models/{MODEL}/versions", {"task_id": task["task_id"]}, 201)
    assert third["weights"] == world.task(task["task_id"])["model"] == rounds[2]["weights_out"]
    assert (third["task_version"], third["round_id"], third["cohort"]) == (3, rounds[2]["round_id"], 3)
    assert third["parent"] == 1  # nothing between the bundle and it is registered
    first = empty.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": 1}, 201)
    second = empty.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": 2}, 201)
    assert (first["number"], first["parent"], second["parent"]) == (3, 1, 3)
    status, data = world.operator("GET", f"/v1/blobs/{third['weights']}")
    assert status == 200
    assert read_weights(data)["w"].dtype == np.float32
    # And by devices, which are offered it.
    empty.promote(2)
    (device,) = world.add_devices(1)
    device.versions = {}
    device.check_in()
    [offer] = device.offers
    assert (offer.bundle, offer.weights) == (bundle, third["weights"])
    assert device.call("GET", f"/v1/blobs/{offer.weights}")[1] == data
    assert device.call("GET", f"/v1/bundles/{offer.bundle}")[0] == 200


def test_lineage_of_a_bundle(world: World, empty: Fleet) -> None:
    parent = empty.add_version()
    folder = world.settings.path(".")
    lineage = Lineage(parent=parent["bundle"], recipe=("PruneChannels(0.5)",), metrics={"accuracy": 0.75})
    file = make_bundle(folder, world.keys.publisher, name="small", lineage=lineage)
    digest = world.operator("POST", "/v1/bundles", file.read_bytes())[1]["digest"]
    made = empty.post(f"models/{MODEL}/versions", {"bundle": digest}, 201)
    assert made["parent"] == 1
    assert (made["bundle_parent"], made["recipe"]) == (parent["bundle"], ["PruneChannels(0.5)"])
    assert made["bundle_metrics"] == {"accuracy": 0.75}


@pytest.mark.sampled(every=3)
def test_a_parent_can_be_told_where_nothing_tells_it(empty: Fleet) -> None:
    bundles = [empty.add_version()["bundle"] for _ in range(2)]
    empty.post("models", {"name": "words", "population": POPULATION}, 201)
    empty.post("models/words/versions", {"bundle": bundles[0]}, 201)
    answer = empty.post("models/words/versions", {"bundle": bundles[1], "parent": 7}, 422)
    assert "no version 7" in answer["detail"]
    assert empty.post("models/words/versions", {"bundle": bundles[1], "parent": 1}, 201)["parent"] == 1


@pytest.mark.sampled(every=3)
def test_evaluations_of_a_version_are_those_of_its_content_and_population(world: World, empty: Fleet) -> None:
    bundle = empty.add_version()["bundle"]
    trained = train(world, 1, bundle)
    weights = empty.post(f"models/{MODEL}/versions", {"task_id": trained["task_id"]}, 201)["weights"]
    common = {
        "kind": "evaluation", "metrics": {"accuracy": 1.0}, "privacy": "plain", "threshold": None, "cohort": 3,
        "bundle": bundle,
    }  # fmt: skip
    for accuracy, settings in ((0.25, {}), (0.5, {"weights": weights}), (0.75, {"weights": weights})):
        world.clock.now += 1
        world.create_task(**common, **settings)
        empty.serve(world.devices, {bundle: accuracy})
    shown = [empty.get(f"models/{MODEL}/versions/{number}")["evaluations"] for number in (1, 2)]
    assert [[each["metrics"]["accuracy"] for each in evaluations] for evaluations in shown] == [[0.25], [0.75, 0.5]]
    assert {(each["devices"], round(each["examples"])) for each in shown[1]} == {(3, 120)}
    # The same content, but other people's devices.
    empty.post("models", {"name": "words", "population": "teachers"}, 201)
    empty.post("models/words/versions", {"bundle": bundle}, 201)
    assert empty.get("models/words/versions/1")["evaluations"] == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "either a bundle or a task_id"),
        ({"bundle": "0" * 64, "task_id": "0" * 32}, "either a bundle or a task_id"),
        ({"bundle": "0" * 64}, "no bundle"),
        ({"bundle": "0" * 64, "task_version": 1}, "task_version"),
        ({"task_id": "0" * 32}, "no task"),
    ],
)
def test_what_cannot_be_registered(empty: Fleet, asked: dict[str, str | int], words: str) -> None:
    assert words in empty.post(f"models/{MODEL}/versions", asked, 422)["detail"]


def test_a_task_that_has_made_nothing_has_no_versions(world: World, empty: Fleet) -> None:
    task = world.create_task()["task_id"]
    assert "has no versions yet" in empty.post(f"models/{MODEL}/versions", {"task_id": task}, 422)["detail"]
    asked = {"task_id": task, "task_version": 4}
    assert "has no version 4" in empty.post(f"models/{MODEL}/versions", asked, 422)["detail"]


def promotions(fleet: Fleet) -> list[tuple[str, int]]:
    return [(each["how"], each["version"]) for each in fleet.get(f"models/{MODEL}/promotions")["items"]][::-1]


@pytest.mark.sampled(every=3)
def test_rolling_back_goes_back_and_not_there_and_back(world: World) -> None:
    fleet = Fleet(world).create(4)
    for number in (3, 2, 4):
        fleet.promote(number)
    path = f"models/{MODEL}/rollback"
    assert [fleet.post(path)["promoted"] for _ in range(3)] == [2, 3, 1]
    assert "no version" in fleet.post(path, None, 409)["detail"]
    assert fleet.model()["promoted"] == 1
    fleet.promote(4)
    assert fleet.post(path)["promoted"] == 1
    assert promotions(fleet) == [
        ("promote", 1), ("promote", 3), ("promote", 2), ("promote", 4),
        ("rollback", 2), ("rollback", 3), ("rollback", 1), ("promote", 4), ("rollback", 1),
    ]  # fmt: skip
    entries = world.operator("GET", "/v1/audit")[1]["items"]
    done = [each for each in entries if each["action"] in ("model.promote", "model.rollback")]
    assert [each["subject"] for each in done] == [f"{MODEL}/{number}" for _, number in promotions(fleet)]
    assert done[4]["detail"] == {"before": 4}


@pytest.mark.sampled(every=3)
def test_rolling_back_leaves_out_what_was_rejected_meanwhile(world: World) -> None:
    fleet = Fleet(world).create(3)
    fleet.promote(2)
    fleet.promote(3)
    fleet.post(f"models/{MODEL}/versions/2/reject", {"reason": "a bug on old phones"})
    assert fleet.post(f"models/{MODEL}/rollback")["promoted"] == 1


def test_rolling_back_takes_back_the_rollout_under_way_and_nothing_else(world: World) -> None:
    fleet = Fleet(world).create(3)
    fleet.promote(3)
    rollout = fleet.begin()
    key = {"Idempotency-Key": "b" * 20}
    done = fleet.post(f"models/{MODEL}/rollback", None, 200, key)
    assert (done["promoted"], done["rollout_id"]) == (3, None)
    assert fleet.show(rollout)["reason"] == "its model was rolled back by the operator"
    # Sent again it is the same rollback, and not also that of the version before.
    assert fleet.post(f"models/{MODEL}/rollback", None, 200, key) == done
    assert fleet.post(f"models/{MODEL}/rollback")["promoted"] == 1
    assert promotions(fleet) == [("promote", 1), ("promote", 3), ("rollback", 3), ("rollback", 1)]


@pytest.mark.sampled(every=3)
def test_the_same_key_is_one_promotion(world: World) -> None:
    fleet = Fleet(world).create(3)
    first, second = ({"Idempotency-Key": letter * 16} for letter in "pq")
    path = f"models/{MODEL}/promote"
    fleet.post(path, {"version": 2}, 200, first)
    fleet.post(path, {"version": 3}, 200, second)
    assert fleet.post(path, {"version": 2}, 200, first)["promoted"] == 3  # it was done, long ago
    assert "another request" in fleet.post(path, {"version": 1}, 409, first)["detail"]
    assert "another request" in fleet.post(f"models/{MODEL}/rollback", None, 409, first)["detail"]
    assert fleet.promote(3)["promoted"] == 3  # is so already
    assert promotions(fleet) == [("promote", 1), ("promote", 2), ("promote", 3)]


def test_a_rejected_version_is_not_promoted_and_a_promoted_one_not_rejected(fleet: Fleet) -> None:
    answer = fleet.post(f"models/{MODEL}/versions/1/reject", {"reason": "x"}, 409)
    assert "roll the model back first" in answer["detail"]
    for _ in range(2):
        assert fleet.post(f"models/{MODEL}/versions/2/reject", {"reason": "slow"})["state"] == "rejected"
    assert "is rejected: slow" in fleet.post(f"models/{MODEL}/promote", {"version": 2}, 409)["detail"]
    assert "no version 3" in fleet.post(f"models/{MODEL}/promote", {"version": 3}, 422)["detail"]
    for _ in range(2):
        assert fleet.post(f"models/{MODEL}/versions/2/restore")["state"] == "registered"
    assert fleet.promote(2)["promoted"] == 2


def test_a_model_is_made_once_and_of_one_population(world: World, fleet: Fleet) -> None:
    asked = {"name": MODEL, "population": POPULATION}
    assert fleet.post("models", asked, 200) == fleet.model()
    assert "taken by another model" in fleet.post("models", asked | {"population": "teachers"}, 409)["detail"]
    assert world.operator("GET", "/v1/models/words")[0] == 404
    assert world.operator("GET", f"/v1/models/{MODEL}/versions/3")[0] == 404


@pytest.mark.sampled(every=3)
def test_lists_come_in_pages(world: World) -> None:
    fleet = Fleet(world).create(5)
    for name in ("words", "notes", "alpha"):
        fleet.post("models", {"name": name, "population": POPULATION}, 201)

    def walk(path: str, key: str) -> list[Any]:
        found, after = [], ""
        while True:
            page = fleet.get(f"{path}?limit=2{after}")
            found += [each[key] for each in page["items"]]
            if page["next"] is None:
                return found
            after = f"&after={page['next']}"

    assert walk("models", "name") == ["alpha", MODEL, "notes", "words"]
    assert walk(f"models/{MODEL}/versions", "number") == [5, 4, 3, 2, 1]
    for number in (2, 3):
        fleet.promote(number)
    assert walk(f"models/{MODEL}/promotions", "number") == [3, 2, 1]
    made = []
    for _ in range(3):
        world.clock.now += 1
        rollout = fleet.begin()
        made.append(rollout["rollout_id"])
        fleet.post(f"rollouts/{rollout['rollout_id']}/abort")
    assert walk("rollouts", "rollout_id") == made[::-1]


@pytest.mark.sampled(every=3)
def test_a_token_is_for_its_populations(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()["rollout_id"]
    task = world.create_task(population=POPULATION)["task_id"]
    made = world.operator("POST", "/v1/tokens", {"name": "t", "role": "operator", "populations": ["teachers"]})[1][
        "token"
    ]
    theirs = {"Authorization": f"Bearer {made}"}
    assert world.operator("GET", "/v1/models", headers=theirs)[1]["items"] == []
    assert world.operator("GET", "/v1/rollouts", headers=theirs)[1]["items"] == []
    gate = {"model": MODEL, "version": 2, "stages": [{"percent": 5, "soak_seconds": 1}], "gate": "none"}
    for method, path, body in [
        ("GET", f"models/{MODEL}", None),
        ("GET", f"models/{MODEL}/versions", None),
        ("GET", f"models/{MODEL}/versions/1", None),
        ("GET", f"models/{MODEL}/promotions", None),
        ("POST", f"models/{MODEL}/versions", {"bundle": fleet.bundles[0]}),
        ("POST", f"models/{MODEL}/versions/2/reject", {"reason": "x"}),
        ("POST", f"models/{MODEL}/versions/2/restore", None),
        ("POST", f"models/{MODEL}/promote", {"version": 2}),
        ("POST", f"models/{MODEL}/rollback", None),
        ("POST", "models", {"name": MODEL, "population": POPULATION}),
        ("POST", "models", {"name": MODEL, "population": "teachers"}),
        ("POST", "rollouts", gate),
        ("GET", f"rollouts/{rollout}", None),
        *(("POST", f"rollouts/{rollout}/{what}", None) for what in ("pause", "resume", "abort")),
        ("GET", f"tasks/{task}/metrics", None),
    ]:
        # What is another's is as if it were not there; that a name is taken cannot be hidden.
        named = {"POST models": 409 if body and body.get("population") == "teachers" else 403, "POST rollouts": 422}
        status, answer = world.operator(method, f"/v1/{path}", body, headers=theirs)
        assert status == named.get(f"{method} {path}", 404), (path, answer)
    assert fleet.model()["promoted"] == 1
    assert world.operator("POST", "/v1/models", {"name": "own", "population": "teachers"}, theirs)[0] == 201
    # Nor are tasks of others a way to their weights.
    status, answer = world.operator("POST", "/v1/models/own/versions", {"task_id": task}, theirs)
    assert status == 422
