"""A stage that cannot have devices enough for its evaluation ends at once, and says how many there are."""

from __future__ import annotations

import pytest

from archipel.server.database.tables import Device as DeviceRow
from archipel.server.registry import stage_devices
from tests.server.rounds.test_leaving import leave
from tests.support.fleet import MODEL, Fleet
from tests.support.world import World

REMEDY = "roll out to a larger percentage, or ask for fewer devices (min_devices, max_devices)"
SIX = {"min_devices": 6, "max_devices": 6}


def soak(world: World, fleet: Fleet, rollout: dict[str, object]) -> dict[str, object]:
    world.clock.now = fleet.show(rollout)["state_ends"]
    world.settle()
    return fleet.show(rollout)


@pytest.mark.sampled(every=3)
def test_a_stage_of_four_that_needs_six(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate=SIX)
    fleet.enrol(rollout, 4)
    shown = soak(world, fleet, rollout)
    assert (shown["state"], shown["ended"]) == ("rolled_back", world.clock.now)
    assert shown["reason"] == (
        f"the evaluation cannot be made: stage 1: 4 devices are eligible, its evaluation needs 6; {REMEDY}"
    )
    # Nothing was measured, so the version may be rolled out again.
    assert fleet.get(f"models/{MODEL}/versions/2")["state"] == "registered"
    assert world.operator("GET", "/v1/tasks")[1]["items"] == []


@pytest.mark.sampled(every=3)
def test_as_many_as_it_needs_are_waited_for(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate=SIX)
    fleet.enrol(rollout, 6)
    assert soak(world, fleet, rollout)["state"] == "evaluating"


@pytest.mark.sampled(every=3)
def test_devices_that_go_while_it_is_evaluated(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    with world.services.database.read() as session:
        extra = [row.device_id for row in session.query(DeviceRow)]
    assert soak(world, fleet, rollout)["state"] == "evaluating"
    for device in inside[1:]:
        assert world.operator("POST", f"/v1/devices/{device.id}/revoke")[0] == 200
    for each in set(extra) - {device.id for device in inside}:
        world.operator("POST", f"/v1/devices/{each}/revoke")
    world.settle()
    shown = fleet.show(rollout)
    assert (shown["state"], shown["stages"][0]["candidate"]["state"]) == ("rolled_back", "cancelled")
    assert shown["reason"] == f"stage 1: 1 device is eligible, its evaluation needs 3; {REMEDY}"


@pytest.mark.sampled(every=4)
def test_devices_that_left_and_rest_count_until_the_deadline(world: World, fleet: Fleet) -> None:
    """They may come again before it; those that rest longer cannot."""
    rollout = fleet.begin(gate={"seconds": 100.0})
    inside, _ = fleet.enrol(rollout, 3)
    soak(world, fleet, rollout)
    for seconds in (30, 60):
        for _ in range(2):
            for device in inside:
                device.check_in()
            world.settle()
        assert all(device.join() for device in inside)
        assert fleet.show(rollout)["state"] == "evaluating"
        assert leave(inside[0])[0] == 200
        world.settle()
        world.clock.now += seconds if seconds == 30 else 0
    shown = fleet.show(rollout)
    assert shown["state"] == "evaluating"  # 60 s of rest, 70 s to the deadline
    world.clock.now += 60
    for _ in range(2):
        for device in inside:
            device.check_in()
        world.settle()
    assert all(device.join() for device in inside)
    assert leave(inside[0])[0] == 200
    world.settle()
    assert "2 devices are eligible, its evaluation needs 3" in str(fleet.show(rollout)["reason"])


@pytest.mark.sampled(every=3)
def test_the_baseline_needs_the_devices_of_the_candidate(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 4)
    world.clock.now = fleet.show(rollout)["state_ends"]
    world.settle()
    accuracy = dict.fromkeys(fleet.bundles, 0.75)
    while not fleet._heard(rollout):
        fleet.serve(inside, accuracy, passes=1)
    (first,) = world.rounds(fleet._heard(rollout))
    assert fleet.show(rollout)["state"] == "evaluating"
    assert world.operator("POST", f"/v1/devices/{first['survivors'][0]}/revoke")[0] == 200
    world.settle()
    assert f"stage 1: 2 devices are eligible, its evaluation needs 3; {REMEDY}" in fleet.show(rollout)["reason"]


def eligible(world: World, fleet: Fleet, able: int, others: int, needed: int) -> str:
    rollout = fleet.begin(eligibility='app == "2.0"', gate={"min_devices": needed, "max_devices": needed})
    inside, _ = fleet.enrol(rollout, able + others)
    for device in inside[:able]:
        device.attributes = {"app": "2.0"}
    for device in world.devices:
        device.check_in()
    return str(soak(world, fleet, rollout)["reason"])


@pytest.mark.sampled(every=3)
def test_whoever_reports_something_else_is_not_eligible(world: World, fleet: Fleet) -> None:
    assert "3 devices are eligible, its evaluation needs 4" in eligible(world, fleet, 3, 3, 4)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("needed", "told"), [(5, ""), (6, "needs are eligible")])
def test_an_operator_cannot_count_who_reports_what(
    world: World, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, needed: int, told: str
) -> None:
    """Four devices report it. In steps of three these are 3 to 5, so 6 are certainly too many, and 5 are not."""
    monkeypatch.setattr(stage_devices, "hides", lambda eligibility, smallest: True)
    whole = stage_devices.too_few
    monkeypatch.setattr(
        "archipel.server.registry.stage_evaluations.too_few",
        lambda session, task, *, by, smallest: whole(session, task, by=by, smallest=3),
    )
    reason = eligible(world, fleet, 4, 2, needed)
    assert (reason == "") if not told else (told in reason)
    assert "4" not in reason
