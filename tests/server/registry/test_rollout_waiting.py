"""What a rollout says that it waits for."""

from __future__ import annotations

import msgspec
import pytest

from archipel.protocol.moments import moment
from archipel.server.app import create_app
from tests.server.registry.test_rollouts import control
from tests.server.registry.test_stage_devices import SIX, soak
from tests.server.rounds.test_leaving import leave
from tests.support.fleet import Fleet
from tests.support.world import World


@pytest.mark.sampled(every=4)
def test_a_stage_that_soaks_warns_of_too_few_devices(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate=SIX)
    fleet.enrol(rollout, 4)
    until = moment(rollout["state_ends"])
    said = fleet.show(rollout)["waiting_for"]
    assert said.startswith(f"stage 1 soaks until {until}; 4 devices are eligible, its evaluation needs 6;")
    fleet.enrol(rollout, 2)
    assert fleet.show(rollout)["waiting_for"] == f"stage 1 soaks until {until}"


@pytest.mark.sampled(every=3)
def test_an_evaluation_says_what_it_waits_for(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    shown = soak(world, fleet, rollout)
    until = moment(shown["state_ends"])
    assert shown["waiting_for"] == f"the candidate is evaluated until {until}; no device is waiting; 3 needed"
    for _ in range(2):
        for device in inside:
            device.check_in()
        world.settle()
    assert all(device.join() for device in inside)
    ends = moment(world.clock.now + 180)
    assert fleet.show(rollout)["waiting_for"] == (
        f"the candidate is evaluated until {until}; round 1: updating, 0 of 3 devices have answered, until {ends}"
    )
    assert leave(inside[0], "data")[0] == 200
    world.settle()
    assert fleet.show(rollout)["waiting_for"].endswith(
        "last failure: round 1: 1 of 3 devices left the round in phase updating, 3 needed (they said: data 1)"
    )
    paused = control(fleet, rollout, "pause")
    assert paused["waiting_for"] == f"paused; it is rolled back at {moment(paused['state_ends'])} unless it is resumed"
    assert control(fleet, rollout, "abort")["waiting_for"] == ""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("smallest", "told"), [(1, True), (3, False)])
def test_an_auditor_is_not_told_numbers_that_depend_on_attributes(
    world: World, fleet: Fleet, smallest: int, told: bool
) -> None:
    auditor = world.operator("POST", "/v1/tokens", {"name": "a", "role": "auditor"})[1]["token"]
    world.app.extensions["archipel"].database.dispose()
    world.app = create_app(msgspec.structs.replace(world.settings, smallest_answer=smallest), clock=world.clock)
    rollout = fleet.begin(eligibility='app == "2.0"')
    assert rollout["waiting_for"]
    shown = world.operator(
        "GET", f"/v1/rollouts/{rollout['rollout_id']}", headers={"Authorization": f"Bearer {auditor}"}
    )[1]
    assert bool(shown["waiting_for"]) is told
