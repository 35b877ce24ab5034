"""Where questions to devices need a second person, an operator who may ask none puts them through a rollout's gate.

The gate's evaluations are queries like others: they wait until an analyst who did not begin the rollout approves, and
are withdrawn with the rollout.
"""

from __future__ import annotations

import pytest

from tests.server.http.test_query_rights import token
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    world,
)
from tests.support.fleet import GATE, MODEL, STAGES, Fleet
from tests.support.world import World


@pytest.fixture
def server_settings() -> dict[str, object]:
    return {"query_approval": True}


@pytest.fixture
def fleet(world: World) -> Fleet:  # noqa: F811
    return Fleet(world).create()


@pytest.mark.sampled(every=4)
def test_a_gates_question_waits_for_an_analyst(world: World, fleet: Fleet) -> None:  # noqa: F811
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    operator, analyst = token(world, "operator"), token(world, "analyst")
    shown = fleet.pass_stage(rollout, inside, 0.75, 0.75)
    candidate = shown["stages"][0]["candidate"]
    assert (shown["state"], candidate["state"], candidate["devices"]) == ("evaluating", "proposed", None)
    path = f"tasks/{candidate['task_id']}"
    assert world.rounds(candidate["task_id"]) == []
    # Neither whoever trains, nor whoever began it, although an admin may run queries.
    assert world.operator("POST", f"/v1/{path}/approve", headers=operator)[0] == 403
    assert "somebody else must" in fleet.post(f"{path}/approve", status=403)["detail"]
    fleet.post(f"{path}/approve", headers=analyst)
    accuracy = {fleet.bundles[1]: 0.75, fleet.bundles[0]: 0.75}
    fleet.serve(inside, accuracy)
    shown = fleet.show(rollout)["stages"][0]
    # The comparison with the promoted version is a question of its own.
    assert (shown["candidate"]["state"], shown["baseline"]["state"]) == ("completed", "proposed")
    fleet.post(f"tasks/{shown['baseline']['task_id']}/approve", headers=analyst)
    fleet.serve(inside, accuracy)
    assert fleet.show(rollout)["stage"] == 2


@pytest.mark.parametrize("how", ["late", "aborted", "its model rolled back"])
@pytest.mark.sampled(every=6)
def test_a_question_is_withdrawn_with_its_rollout(world: World, fleet: Fleet, how: str) -> None:  # noqa: F811
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    shown = fleet.pass_stage(rollout, inside, 0.75, 0.75)
    task = shown["stages"][0]["candidate"]["task_id"]
    if how == "late":
        world.clock.now = shown["state_ends"]
        world.settle()
        assert f"was not approved (archipel task approve {task})" in fleet.show(rollout)["reason"]
    elif how == "aborted":
        fleet.post(f"rollouts/{rollout['rollout_id']}/abort")
    else:
        fleet.post(f"models/{MODEL}/rollback")
    assert fleet.show(rollout)["state"] == "rolled_back"
    assert fleet.get(f"tasks/{task}")["state"] == "cancelled"
    fleet.post(f"tasks/{task}/approve", status=409, headers=token(world, "analyst"))


@pytest.mark.sampled(every=3)
def test_a_question_is_not_let_go_while_its_rollout_is_paused(world: World, fleet: Fleet) -> None:  # noqa: F811
    rollout = fleet.begin()
    inside, _ = fleet.enrol(rollout, 3)
    task = fleet.pass_stage(rollout, inside, 0.75, 0.75)["stages"][0]["candidate"]["task_id"]
    analyst = token(world, "analyst")
    fleet.post(f"rollouts/{rollout['rollout_id']}/pause")
    assert "its rollout is paused" in fleet.post(f"tasks/{task}/approve", status=409, headers=analyst)["detail"]
    fleet.post(f"rollouts/{rollout['rollout_id']}/resume")
    assert fleet.post(f"tasks/{task}/approve", headers=analyst)["state"] == "running"


def test_whom_a_gate_asks_an_operator_does_not_choose(world: World, fleet: Fleet) -> None:  # noqa: F811
    """By its eligibility a rollout could ask about any group of devices."""
    asked = {"model": MODEL, "version": 2, "stages": STAGES, "gate": GATE, "eligibility": "battery > 0.5"}
    operator = token(world, "operator")
    assert "gate" in fleet.post("rollouts", asked, 403, operator)["detail"]
    fleet.post("rollouts", {**asked, "gate": "none", "eligibility": "battery > 0.5"}, 201, operator)
