"""An edge server lies to the root about its site, or to its devices about the root.

The root sees sums of sites only, as a server sees sums of devices only: a lie beyond what honest sites can have spoils
the round. A device at an edge has the root's key from its token, and checks each plan against the root's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.client import Agent
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import Sealed, seal
from archipel.server.database.site_tables import SiteRound as Row
from archipel.server.database.tables import Task
from archipel.server.rounds.sites import opening
from tests.edge.test_rounds import uplink
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world

Lie = Callable[[np.ndarray, int], tuple[np.ndarray, int]]
LIES: dict[str, tuple[Lie, str]] = {
    # Three sites of up to four devices each.
    "more devices than a site may have": (lambda total, devices: (total, 100), "3 sites count 105 devices"),
    "no devices": (lambda total, devices: (total, -5), "3 sites count 0 devices"),
    "an update for a thousand": (lambda total, devices: (total * np.array([50, 50, 50, 1]), devices), "deltas"),
    "a weight of its own making": (lambda total, devices: (total + np.array([0, 0, 0, 4_000_000]), devices), "beyond"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.sampled(every=8)
def test_a_site_beyond_what_sites_can_have_spoils_the_round(tmp_path: Path, lie: str) -> None:
    lies, why = LIES[lie]
    with open_edge_world(tmp_path) as world:
        world.site("a", ComputedSite([1, 2], lies))
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        task = world.task(min_cohort=3)
        with world.running():
            world.until(lambda: [each for each in world.rounds(task) if each.phase == "failed"])
        [failed, *_] = world.rounds(task)
        assert why in failed.reason
        assert (failed.spoiled, failed.weights_out) == (True, None)


def attacked(world: EdgeWorld, expected: str) -> list[Agent]:
    """The edge's devices refuse with these words; the root goes on with the other sites."""
    devices = [world.device(number) for number in (1, 2)]
    world.site("b", ComputedSite([3, 4, 5]))
    world.site("c", ComputedSite([6, 7]))
    uplink(world)
    task = world.task()
    with world.running():
        world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
        world.until(lambda: all(agent.rounds and agent.rounds[-1].step == "closed" for agent in devices))
    for agent in devices:
        assert expected in agent.rounds[-1].reason
        assert (agent.rounds[-1].result, agent.rounds[-1].masked) == ("refused", None)
    np.testing.assert_array_equal(world.weights(task), world.averaged([3, 4, 5, 6, 7]))
    return devices


def changed_plan(monkeypatch: pytest.MonkeyPatch, change: Callable[[RoundPlan], RoundPlan]) -> None:
    honest = opening.local_plan

    def made(plan: RoundPlan, above: RoundPlan, sealed: Sealed, **given: Any) -> RoundPlan:
        return change(honest(plan, above, sealed, **given))

    monkeypatch.setattr(opening, "local_plan", made)


@pytest.mark.sampled(every=8)
def test_a_task_of_its_own_under_the_root_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_edge_world(tmp_path) as world:
        key = world.edge.settings.private_key

        def own(plan: RoundPlan) -> RoundPlan:
            assert plan.origin is not None
            first = msgspec.json.decode(plan.origin.body, type=RoundPlan)
            return msgspec.structs.replace(plan, origin=seal("plan", first, key))

        changed_plan(monkeypatch, own)
        attacked(world, "the signature does not verify")


@pytest.mark.sampled(every=4)
def test_other_hyperparameters_than_the_root_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_edge_world(tmp_path) as world:
        changed_plan(monkeypatch, lambda plan: msgspec.structs.replace(plan, hyperparameters={"lr": 1.0}))
        attacked(world, "its hyperparameters is not that of the root's plan")


@pytest.mark.sampled(every=8)
def test_a_training_of_its_own_with_the_root_s_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_edge_world(tmp_path) as world:
        changed_plan(monkeypatch, lambda plan: msgspec.structs.replace(plan, origin=None))
        attacked(world, "a training of the server's own")


@pytest.mark.sampled(every=4)
def test_the_same_round_of_the_root_a_second_time(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        devices = [world.device(number) for number in (1, 2)]
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        uplink(world)
        task = world.task()
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            world.until(lambda: all(agent.rounds and agent.rounds[-1].step == "closed" for agent in devices))
        # The edge forgets the sum, and asks for another one, with other survivors maybe.
        with world.edge._services.database.write() as session:
            [row] = session.query(Row).all()
            row.state, row.local_round, row.sum_by = "wanted", None, row.sum_by + 60
            # Its uplink may have heard already that the root's task has ended.
            own = session.get_one(Task, task.task_id)
            own.state, own.reason, own.ended = "running", "", None
        with world.running(devices):
            world.until(lambda: all(len(agent.rounds) == 2 and agent.rounds[-1].step == "closed" for agent in devices))
    for agent in devices:
        first, second = agent.rounds
        assert (first.result, second.result) == ("took_part", "refused")
        assert "of the root server: this device has been in it" in second.reason
        assert second.masked is None
