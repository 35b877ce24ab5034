"""What the retention rule deletes, and what it never touches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from archipel.bundle import write_weights
from archipel.server.storage.blob_rows import record_blob
from tests.server.retention.training import deleted, pass_days, rows, train, weights_of
from tests.server.rounds.test_buffered_rounds import asynchronous, seats
from tests.server.rounds.test_plain_rounds import update
from tests.support.fleet import MODEL, Fleet
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"keep_versions": 2, "keep_days": 10.0}


def register(world: World, task: dict[str, Any], numbers: range) -> Fleet:
    """A model whose versions 1, 2, ... are these versions of the training."""
    fleet = Fleet(world).create(0, promote=None)
    for number in numbers:
        fleet.post(f"models/{MODEL}/versions", {"task_id": task["task_id"], "task_version": number}, 201)
    return fleet


class TestOff:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {}

    @pytest.mark.sampled(every=3)
    def test_without_the_setting_nothing_is_deleted(self, world: World) -> None:
        weights = weights_of(world, train(world, 3))
        pass_days(world, 4000)
        assert deleted(world, weights) == [False] * 4


@pytest.mark.sampled(every=4)
def test_the_newest_and_the_young_stay(world: World) -> None:
    weights = weights_of(world, train(world, 4))
    pass_days(world, 9.9)
    assert deleted(world, weights) == [False] * 5
    pass_days(world, 0.2)
    # Versions 0 to 2 are neither of the newest two nor of the last ten days.
    assert deleted(world, weights) == [True, True, True, False, False]
    pass_days(world, 4000)
    assert deleted(world, weights) == [True, True, True, False, False]


def evaluation_of(world: World, task: dict[str, Any], weights: str) -> dict[str, Any]:
    return world.create_task(
        kind="evaluation", weights=weights, bundle=task["bundle"], name="e", metrics={"accuracy": 1.0},
        min_contributors=3, min_cohort=3, cohort=3, privacy="plain", threshold=None,
    )  # fmt: skip


@pytest.mark.sampled(every=3)
def test_what_a_running_or_paused_task_works_with_stays(world: World) -> None:
    task = train(world, 3, of=9)
    weights = weights_of(world, task)
    asked = evaluation_of(world, task, weights[1])["task_id"]
    for verb in ("pause", "resume"):
        for each in (task["task_id"], asked):
            assert world.operator("POST", f"/v1/tasks/{each}/{verb}")[0] == 200
        pass_days(world, 11)
        assert deleted(world, weights) == [True, False, False, False], verb
    assert world.operator("POST", f"/v1/tasks/{asked}/cancel")[0] == 200
    pass_days(world, 1)
    assert deleted(world, weights) == [True, True, False, False]


class TestProposed:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {"keep_versions": 1, "keep_days": 10.0, "query_approval": True}

    @pytest.mark.sampled(every=3)
    def test_what_a_proposed_evaluation_is_of_stays_until_that_is_cancelled(self, world: World) -> None:
        task = train(world, 2)
        weights = weights_of(world, task)
        query = evaluation_of(world, task, weights[1])
        assert query["state"] == "proposed"
        pass_days(world, 11)
        assert deleted(world, weights) == [True, False, False]
        assert world.operator("POST", f"/v1/tasks/{query['task_id']}/cancel")[0] == 200
        pass_days(world, 11)
        assert deleted(world, weights) == [True, True, False]


@pytest.mark.sampled(every=4)
def test_what_is_promoted_and_what_a_rollback_goes_back_to_stays(world: World) -> None:
    task = train(world, 6)
    weights = weights_of(world, task)[1:]
    fleet = register(world, task, range(1, 7))
    for number in (1, 3, 2):
        fleet.promote(number)
    # Version 2 was promoted by mistake: no rollback goes to it any more.
    fleet.post(f"models/{MODEL}/rollback")
    pass_days(world, 11)
    assert deleted(world, weights) == [False, True, False, True, False, False]
    assert fleet.post(f"models/{MODEL}/rollback")["promoted"] == 1
    pass_days(world, 11)
    # Version 3 was rolled back as well.
    assert deleted(world, weights) == [False, True, True, True, False, False]


@pytest.mark.sampled(every=4)
def test_both_versions_of_a_rollout_stay_until_it_has_ended(world: World) -> None:
    task = train(world, 5)
    weights = weights_of(world, task)[1:]
    fleet = register(world, task, range(1, 6))
    fleet.promote(1)
    rollout = fleet.begin(gate="none", stages=[{"percent": 50, "soak_seconds": 31 * 86400}])
    fleet.post(f"rollouts/{rollout['rollout_id']}/pause")
    pass_days(world, 5)
    fleet.post(f"rollouts/{rollout['rollout_id']}/resume")
    pass_days(world, 6)
    assert deleted(world, weights) == [False, False, True, False, False]
    fleet.post(f"rollouts/{rollout['rollout_id']}/abort")
    pass_days(world, 1)
    assert deleted(world, weights) == [False, True, True, False, False]


@pytest.mark.sampled(every=4)
def test_the_same_bytes_stay_while_one_use_keeps_them(world: World) -> None:
    # Version 0 of all trainings of a bundle has its own weights.
    old = train(world, 2)
    new = train(world, 1, seed=1, bundle=old["bundle"])
    shared = weights_of(world, old)[0]
    assert weights_of(world, new)[0] == shared
    pass_days(world, 30)
    # It is none of the newest two of the first training, but of the second.
    assert deleted(world, [shared]) == [False]


@pytest.mark.sampled(every=3)
def test_a_model_has_a_rule_of_its_own(world: World) -> None:
    task = train(world, 6)
    weights = weights_of(world, task)[1:]
    fleet = register(world, task, range(1, 7))
    assert fleet.model()["keep_versions"] is None
    told = fleet.post(f"models/{MODEL}/retention", {"keep_versions": 0})
    assert (told["keep_versions"], told["keep_days"]) == (0, None)
    pass_days(world, 100)
    assert deleted(world, weights) == [False] * 6
    fleet.post(f"models/{MODEL}/retention", {"keep_versions": 4, "keep_days": 365})
    pass_days(world, 100)
    assert deleted(world, weights) == [False] * 6
    fleet.post(f"models/{MODEL}/retention", {"keep_versions": 4})
    pass_days(world, 1)
    assert deleted(world, weights) == [True, True, False, False, False, False]
    fleet.post(f"models/{MODEL}/retention", {})
    pass_days(world, 1)
    assert deleted(world, weights) == [True] * 4 + [False] * 2
    assert [each["detail"] for each in audited_keeps(world)] == [
        {"versions": 0, "days": None}, {"versions": 4, "days": 365}, {"versions": 4, "days": None},
        {"versions": None, "days": None},
    ]  # fmt: skip


def audited_keeps(world: World) -> list[dict[str, Any]]:
    entries = world.operator("GET", "/v1/audit")[1]["items"]
    return [each for each in entries if each["action"] == "model.keep"]


class TestOnlyOneModel:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {}

    @pytest.mark.sampled(every=3)
    def test_a_model_may_have_a_rule_where_the_server_has_none(self, world: World) -> None:
        task = train(world, 3)
        weights = weights_of(world, task)
        fleet = register(world, task, range(1, 4))
        fleet.post(f"models/{MODEL}/retention", {"keep_versions": 1, "keep_days": 0})
        pass_days(world, 1)
        # Version 0 is in no model, and the server keeps everything.
        assert deleted(world, weights) == [False, True, True, False]


@pytest.mark.sampled(every=4)
def test_states_go_with_the_weights_of_their_version(world: World, tmp_path: Path) -> None:
    file = make_bundle(tmp_path, world.keys.publisher, name="adam", strategy="fedadam", weighting="examples")
    status, answer = world.operator("POST", "/v1/bundles", file.read_bytes())
    assert status == 201, answer
    task = train(world, 4, of=5, bundle=answer["digest"])
    states = rows(world, "state")
    assert len(states) == 5
    pass_days(world, 11)
    gone = [row for row in rows(world, "state").values() if row.deleted is not None]
    assert deleted(world, weights_of(world, task)) == [True, True, True, False, False]
    assert len(gone) == 3
    # The task goes on from the newest state, which is there.
    for device in world.devices:
        device.open_session()
    devices = world.devices
    world.start_round(devices)
    assert world.services.blobs.has(world.task(task["task_id"])["model"])


def test_broadcasts_go_when_they_are_old_and_no_round_needs_them(world: World) -> None:
    data = write_weights({})
    digest = world.services.blobs.put(data)
    with world.services.database.write() as session:
        record_blob(session, world.services.blobs, digest=digest, kind="broadcast", size=len(data), now=world.clock.now)
    pass_days(world, 9)
    assert rows(world, "broadcast")[digest].deleted is None
    pass_days(world, 2)
    assert rows(world, "broadcast")[digest].deleted is not None


def test_bundles_stay(world: World) -> None:
    world.publish()
    pass_days(world, 4000)
    assert all(row.deleted is None for row in rows(world, "bundle").values())


class TestAtWork:
    @pytest.fixture
    def server_settings(self) -> Mapping[str, object]:
        return {"keep_versions": 1, "keep_days": 0.0}

    @pytest.mark.sampled(every=3)
    def test_weights_that_a_device_still_works_with_stay(self, world: World) -> None:
        """In a buffered task a device keeps its seat after the round that it began in is over."""
        task = asynchronous(world, rounds=5, deadlines={"updating": 7200})
        devices = world.add_devices(6)
        assert seats(world, devices) == devices
        for number in (1, 2):
            for index, device in enumerate(devices[:3]):
                device.updating(**update(10 * number + index))
            world.clock.now += 1
            world.settle()
            assert seats(world, devices[:3]) == devices[:3]
        weights = weights_of(world, task)
        world.clock.now += 3600  # the next look; the seats last for hours
        world.settle()
        assert {device.plan.weights for device in devices if device.plan} == {weights[0], weights[2]}
        assert deleted(world, weights) == [False, False, False]
        world.clock.now += 7200
        world.settle()
        assert deleted(world, weights) == [True, True, False]
