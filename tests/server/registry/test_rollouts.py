"""A rollout from its first stage to its end: by the devices' results, by the clock, and by the operator."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.fleet import GATE, MODEL, STAGES, Fleet
from tests.support.world import World


def actions(world: World, *prefixes: str) -> list[str]:
    return [
        each["action"] for each in world.operator("GET", "/v1/audit")[1]["items"] if each["action"].startswith(prefixes)
    ]


@pytest.mark.parametrize("privacy", ["plain", "secure"])
@pytest.mark.sampled(every=4)
def test_a_version_that_is_good_in_every_stage_is_promoted(world: World, fleet: Fleet, privacy: str) -> None:
    rollout = fleet.begin(gate={"privacy": privacy})
    inside, outside = fleet.enrol(rollout, 3, 1)
    assert (rollout["state"], rollout["stage"], rollout["baseline"]) == ("soaking", 1, 1)
    world.settle()
    soaking = {**rollout, "waiting_for": fleet.show(rollout)["waiting_for"]}
    assert fleet.show(rollout) == soaking  # nothing happens before the stage has soaked
    shown = fleet.pass_stage(rollout, inside, 0.75, 0.75)
    assert (shown["state"], shown["stage"]) == ("soaking", 2)
    first = shown["stages"][0]
    assert first["passed"]
    assert (first["candidate"]["version"], first["baseline"]["version"]) == (2, 1)
    for side in ("candidate", "baseline"):
        assert (first[side]["state"], first[side]["devices"]) == ("completed", 3)
        assert first[side]["value"] == pytest.approx(0.75, abs=1e-3)
        assert first[side]["examples"] == pytest.approx(120, rel=1e-3)
    assert fleet.model()["promoted"] == 1
    shown = fleet.pass_stage(rollout, [*inside[:2], *outside], 0.9, 0.75)
    assert (shown["state"], shown["reason"]) == ("completed", "")
    assert [each["passed"] for each in shown["stages"]] == [True, True]
    model = fleet.model()
    assert (model["promoted"], model["rollout_id"]) == (2, None)
    [entry, _] = fleet.get(f"models/{MODEL}/promotions")["items"]
    assert (entry["how"], entry["version"], entry["rollout_id"]) == ("rollout", 2, rollout["rollout_id"])
    assert actions(world, "rollout.", "model.") == [
        "model.create", "model.promote", "rollout.create", "rollout.stage", "model.rollout", "rollout.completed",
    ]  # fmt: skip


@pytest.mark.sampled(every=4)
def test_a_version_that_is_worse_is_rolled_back_and_rejected(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    shown = fleet.pass_stage(rollout, inside, 0.69, 0.75)
    assert (shown["state"], shown["stage"], shown["ended"]) == ("rolled_back", 1, world.clock.now)
    assert "accuracy is 0.69, of the promoted version 0.75: worse by 0.06, allowed is 0.05" in shown["reason"]
    assert shown["stages"][0]["passed"] is False
    assert shown["stages"][1]["started"] is None
    assert fleet.model()["promoted"] == 1
    version = fleet.get(f"models/{MODEL}/versions/2")
    assert (version["state"], version["reason"]) == ("rejected", shown["reason"])
    assert [round(each["metrics"]["accuracy"], 5) for each in version["evaluations"]] == [0.69]
    # Neither at once nor step by step, until somebody says that it was a mistake.
    for path, body in (("promote", {"version": 2}), ("rollouts", None)):
        asked = body or {"model": MODEL, "version": 2, "stages": STAGES, "gate": "none"}
        where = path if body is None else f"models/{MODEL}/{path}"
        assert "is rejected: accuracy is" in fleet.post(where, asked, 409)["detail"]
    assert fleet.post(f"models/{MODEL}/versions/2/restore")["state"] == "registered"
    fleet.begin()
    assert actions(world, "rollout.", "version.") == [
        "version.register", "version.register", "rollout.create", "rollout.rolled_back", "version.restore",
        "rollout.create",
    ]  # fmt: skip


@pytest.mark.sampled(every=6)
def test_what_is_bad_by_itself_does_not_wait_for_the_comparison(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate={"worst": 0.8})
    inside, _ = fleet.enrol(rollout, 3)
    shown = fleet.pass_stage(rollout, inside, 0.79, 0.5)
    assert (shown["state"], shown["reason"]) == ("rolled_back", "accuracy is 0.79, the worst allowed is 0.8")
    stage = shown["stages"][0]
    assert (stage["candidate"]["state"], stage["baseline"]) == ("completed", None)


@pytest.mark.sampled(every=4)
def test_both_versions_are_evaluated_on_the_same_devices(world: World, fleet: Fleet) -> None:
    """However many others wait, and although one of them does not come again."""
    rollout = fleet.begin(gate={"min_devices": 3, "max_devices": 4})
    inside, _ = fleet.enrol(rollout, 7)
    fleet.pass_stage(rollout, inside, 0.9, 0.9)
    stage = fleet.show(rollout)["stages"][0]
    [first], [second] = (world.rounds(stage[side]["task_id"]) for side in ("candidate", "baseline"))
    assert first["survivors"] == second["survivors"]
    assert len(first["survivors"]) == 4

    gone = []
    fleet.pass_stage(rollout, inside, 0.9, 0.9, after_first=gone)
    stage = fleet.show(rollout)["stages"][1]
    [first], [second] = (world.rounds(stage[side]["task_id"]) for side in ("candidate", "baseline"))
    assert set(second["survivors"]) == set(first["survivors"]) - {gone[0].id}
    assert fleet.show(rollout)["state"] == "completed"


@pytest.mark.sampled(every=4)
def test_a_metric_beyond_its_range_is_no_measurement(world: World, fleet: Fleet) -> None:
    """Two versions that are both off the scale look alike."""
    rollout = fleet.begin(gate={"range": 0.5})
    inside, _ = fleet.enrol(rollout, 3)
    shown = fleet.pass_stage(rollout, inside, 0.9, 0.9)
    assert shown["state"] == "rolled_back"
    assert "accuracy of the candidate was beyond the range of 0.5" in shown["reason"]
    assert fleet.get(f"models/{MODEL}/versions/2")["state"] == "registered"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("come", "waited"), [(0, "none"), (2, "2")])
def test_without_a_result_in_time_it_is_rolled_back_but_not_rejected(
    world: World, fleet: Fleet, come: int, waited: str
) -> None:
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    world.clock.now += 60
    world.settle()
    assert fleet.show(rollout)["state"] == "evaluating"
    world.clock.now += 599
    world.settle()
    assert fleet.show(rollout)["state"] == "evaluating"
    for device in inside[:come]:
        device.check_in()
    world.clock.now += 1
    world.settle()
    shown = fleet.show(rollout)
    said = "the evaluation had no result in time: that of the candidate needs 3 devices at a time"
    said += f", and {waited} waited at the end"
    assert (shown["state"], shown["reason"]) == ("rolled_back", said)
    stage = shown["stages"][0]
    assert (stage["passed"], stage["candidate"]["state"], stage["baseline"]) == (None, "cancelled", None)
    assert fleet.get(f"models/{MODEL}/versions/2")["state"] == "registered"


@pytest.mark.parametrize("seconds", [40.0, 3600.0])
@pytest.mark.sampled(every=6)
def test_a_stage_with_fewer_devices_than_may_take_part_is_measured_in_time(
    world: World, fleet: Fleet, seconds: float
) -> None:
    rollout = fleet.begin(gate={"max_devices": 6, "seconds": seconds})
    inside, _ = fleet.enrol(rollout, 4)
    world.clock.now += 60
    world.settle()
    accuracy = {fleet.bundles[1]: 0.75, fleet.bundles[0]: 0.75}
    fleet.serve(inside, accuracy)
    assert fleet.show(rollout)["state"] == "evaluating", "it waits for the other two for a while"
    world.clock.now += min(60.0, seconds / 4) + 1
    fleet.serve(inside, accuracy)
    shown = fleet.show(rollout)
    assert (shown["state"], shown["stage"]) == ("soaking", 2)
    first = shown["stages"][0]
    assert [first[side]["devices"] for side in ("candidate", "baseline")] == [4, 4]


@pytest.mark.sampled(every=3)
def test_an_evaluation_that_is_cancelled_ends_it(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    fleet.enrol(rollout, 3)
    world.clock.now += 60
    world.settle()
    task = fleet.show(rollout)["stages"][0]["candidate"]["task_id"]
    fleet.post(f"tasks/{task}/cancel")
    world.settle()
    shown = fleet.show(rollout)
    assert shown["state"] == "rolled_back"
    assert shown["reason"] == "the evaluation of version 2 is cancelled: cancelled by the operator"


@pytest.mark.sampled(every=3)
def test_too_few_examples_are_no_result(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate={"min_examples": 121})  # three devices bring 40 each
    inside, _ = fleet.enrol(rollout, 3)
    shown = fleet.pass_stage(rollout, inside, 0.9, 0.9)
    assert shown["state"] == "rolled_back"
    assert shown["reason"] == "the candidate was evaluated on 120 examples, 121 needed"
    assert fleet.get(f"models/{MODEL}/versions/2")["state"] == "registered"


@pytest.mark.sampled(every=4)
def test_only_devices_of_the_stage_evaluate(world: World, fleet: Fleet) -> None:
    """And of these only those for which the expression is true, and no more than were asked for."""
    rollout = fleet.begin(eligibility='app == "2.0"', gate={"max_devices": 4})
    inside, outside = fleet.enrol(rollout, 6, 5)
    for device in [*inside[:5], *outside]:
        device.attributes = {"app": "2.0"}
    shown = fleet.pass_stage(rollout, [*inside, *outside], 0.75, 0.75)
    assert shown["stage"] == 2
    for side in ("candidate", "baseline"):
        task = shown["stages"][0][side]["task_id"]
        assert (world.task(task)["percent"], world.task(task)["eligibility"]) == (50.0, 'app == "2.0"')
        [made] = world.rounds(task)
        took_part = {each["device_id"] for each in made["participants"]}
        assert took_part <= {device.id for device in inside[:5]}
        assert len(took_part) == 4


def test_without_a_gate_only_time_counts(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate="none")
    for state, stage in (("soaking", 2), ("completed", 2)):
        world.clock.now = fleet.show(rollout)["state_ends"]
        world.settle()
        assert (fleet.show(rollout)["state"], fleet.show(rollout)["stage"]) == (state, stage)
    assert fleet.model()["promoted"] == 2


def control(fleet: Fleet, rollout: dict[str, Any], what: str, status: int = 200) -> dict[str, Any]:
    return fleet.post(f"rollouts/{rollout['rollout_id']}/{what}", None, status)


def test_a_pause_stops_the_soaking_and_what_was_left_of_it_is_left(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate="none")
    world.clock.now += 40
    assert control(fleet, rollout, "pause")["state"] == "paused"
    world.clock.now += 1000
    world.settle()
    assert control(fleet, rollout, "pause")["state"] == "paused"
    resumed = control(fleet, rollout, "resume")
    assert (resumed["state"], resumed["state_ends"]) == ("soaking", world.clock.now + 20)
    assert control(fleet, rollout, "resume") == resumed
    world.clock.now += 20
    world.settle()
    assert fleet.show(rollout)["stage"] == 2
    assert actions(world, "rollout.")[:3] == ["rollout.create", "rollout.pause", "rollout.resume"]


@pytest.mark.sampled(every=4)
def test_a_pause_while_evaluating_holds_the_evaluation(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    world.clock.now += 60
    world.settle()
    world.clock.now += 100
    assert control(fleet, rollout, "pause")["stages"][0]["candidate"]["state"] == "paused"
    world.clock.now += 3600
    fleet.reopen(inside)
    fleet.serve(inside, {})  # nobody is sent anything
    assert control(fleet, rollout, "resume")["state_ends"] == world.clock.now + 500
    fleet.serve(inside, {fleet.bundles[1]: 0.8, fleet.bundles[0]: 0.8})
    assert fleet.show(rollout)["stage"] == 2


@pytest.mark.sampled(every=3)
def test_no_pause_lasts_for_ever(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    control(fleet, rollout, "pause")
    world.clock.now += 7 * 86400 - 1
    world.settle()
    assert fleet.show(rollout)["state"] == "paused"
    world.clock.now += 1
    world.settle()
    shown = fleet.show(rollout)
    assert (shown["state"], shown["reason"]) == ("rolled_back", "it was paused for too long")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("moment", ["soaking", "evaluating", "paused"])
def test_abort_at_any_moment(world: World, fleet: Fleet, moment: str) -> None:
    rollout = fleet.begin()
    fleet.enrol(rollout, 3)
    if moment != "soaking":
        world.clock.now += 60
        world.settle()
    if moment == "paused":
        control(fleet, rollout, "pause")
    assert fleet.show(rollout)["state"] == moment
    done = control(fleet, rollout, "abort")
    assert (done["state"], done["reason"]) == ("rolled_back", "aborted by the operator")
    assert control(fleet, rollout, "abort") == done
    for what in ("pause", "resume"):
        assert control(fleet, rollout, what, 409)["detail"] == "the rollout is rolled_back"
    world.settle()
    assert fleet.show(rollout) == done
    assert fleet.model()["rollout_id"] is None
    assert all(task["ended"] is not None for task in fleet.get("tasks")["items"])
    fleet.begin()  # it was not rejected


@pytest.mark.sampled(every=3)
def test_one_rollout_of_a_model_at_a_time_and_no_promotion_beside_it(world: World, fleet: Fleet) -> None:
    fleet.add_version()
    rollout = fleet.begin()
    said = f"rollout {rollout['rollout_id']} of version 2 is under way; abort it first"
    again = {"model": MODEL, "version": 3, "stages": STAGES, "gate": "none"}
    assert fleet.post("rollouts", again, 409)["detail"] == said
    assert fleet.post(f"models/{MODEL}/promote", {"version": 3}, 409)["detail"] == said
    assert fleet.post(f"models/{MODEL}/versions/2/reject", {"reason": "x"}, 409)["detail"] == said
    assert fleet.post(f"models/{MODEL}/versions/3/reject", {"reason": "x"})["state"] == "rejected"
    assert fleet.get(f"models/{MODEL}/versions/2")["state"] == "candidate"


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"version": 1}, 409, "promoted already"),
        ({"version": 9}, 422, "no version 9"),
        ({"model": "words"}, 422, "no model 'words'"),
        ({"stages": []}, 400, "stages"),
        ({"stages": [{"percent": 50, "soak_seconds": 0}] * 2}, 422, "each must have more"),
        ({"stages": [{"percent": 101, "soak_seconds": 0}]}, 400, "percent"),
        ({"stages": [{"percent": 0, "soak_seconds": 0}]}, 400, "percent"),
        ({"eligibility": "ram >"}, 422, "eligibility"),
        ({"gate": {"max_loss": None}}, 422, "neither max_loss nor worst"),
        ({"gate": {"worst": 1.5}}, 422, "beyond the range"),
        ({"gate": {"metric": "f1"}}, 422, "metric 'f1'"),
        ({"gate": {"min_devices": 4}}, 422, "max_devices 3 is below"),
        ({"gate": {"min_devices": 2}}, 422, "min_cohort 2 is below the policy's 3"),
        ({"gate": {"seconds": 0}}, 400, "seconds"),
        ({"gate": "all"}, 400, "gate"),
        ({"gate": None}, 400, "gate"),
    ],
)
@pytest.mark.sampled(every=6)
def test_what_cannot_be_is_refused_when_it_is_asked_for(
    fleet: Fleet, settings: dict[str, Any], status: int, words: str
) -> None:
    gate = settings.get("gate", {})
    asked = {"model": MODEL, "version": 2, "stages": STAGES, **settings}
    asked["gate"] = {**GATE, **gate} if isinstance(gate, dict) else gate
    answer = fleet.post("rollouts", asked, status)
    assert words in answer["detail"]
    assert fleet.get("rollouts")["items"] == []


def test_there_must_be_something_to_go_back_to(world: World) -> None:
    fleet = Fleet(world).create(promote=None)
    answer = fleet.post("rollouts", {"model": MODEL, "version": 2, "stages": STAGES, "gate": "none"}, 409)
    assert "there is none to go back to" in answer["detail"]


def test_the_same_key_is_one_rollout(fleet: Fleet) -> None:
    asked = {"model": MODEL, "version": 2, "stages": STAGES, "gate": "none"}
    key = {"Idempotency-Key": "r" * 20}
    first = fleet.post("rollouts", asked, 201, key)
    assert fleet.post("rollouts", asked, 200, key) == first
    assert "another request" in fleet.post("rollouts", {**asked, "version": 1}, 409, key)["detail"]
    # And also when it is over.
    done = control(fleet, first, "abort")
    assert fleet.post("rollouts", asked, 200, key) == done


def at_once(fleet: Fleet, requests: list[tuple[str, dict[str, Any]]]) -> list[int]:
    statuses = []
    threads = [
        threading.Thread(
            target=lambda path=path, body=body: statuses.append(fleet.world.operator("POST", path, body)[0])
        )
        for path, body in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(statuses)


@pytest.mark.sampled(every=3)
def test_of_requests_at_the_same_time_one_begins_a_rollout(fleet: Fleet) -> None:
    asked = {"model": MODEL, "version": 2, "stages": STAGES, "gate": "none"}
    assert at_once(fleet, [("/v1/rollouts", asked)] * 6) == [201] + [409] * 5
    [made] = fleet.get("rollouts")["items"]
    assert fleet.get(f"rollouts?model={MODEL}")["items"] == [made]
    assert fleet.get("rollouts?model=another")["items"] == []


@pytest.mark.sampled(every=3)
def test_first_promotions_of_a_population_at_the_same_time(world: World) -> None:
    fleet = Fleet(world).create(1, promote=None)
    names = [f"m{number}" for number in range(6)]
    for name in names:
        fleet.post("models", {"name": name, "population": "pupils"}, 201)
        fleet.post(f"models/{name}/versions", {"bundle": fleet.bundles[0]}, 201)
    assert at_once(fleet, [(f"/v1/models/{name}/promote", {"version": 1}) for name in names]) == [200] * 6
    (device,) = world.add_devices(1)
    device.versions = {}
    device.check_in()
    assert [each.model for each in device.offers] == names


@pytest.mark.sampled(every=3)
def test_the_same_content_registered_at_the_same_time_is_one_version(fleet: Fleet) -> None:
    fleet.post("models", {"name": "words", "population": "pupils"}, 201)
    assert at_once(fleet, [("/v1/models/words/versions", {"bundle": fleet.bundles[0]})] * 6) == [200] * 5 + [201]
