"""Rounds of an edge server beside other sites, of which each step can be seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel.client import Agent
from archipel.edge.site import EdgeSite
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world


def uplink(world: EdgeWorld) -> Agent:
    """The edge's agent, which is enrolled at the root."""
    agent = Agent(
        world.uplink_config(), examples=dict, on_event=world.events.append,
        site=EdgeSite(world.edge._services, world.upstream),
    )  # fmt: skip
    agent.enrol(world.token("root", "hospitals", "aggregator"))
    world.agents.append(agent)
    return agent


@pytest.mark.sampled(every=3)
def test_the_model_is_that_of_all_devices_and_each_server_knows_what_it_may(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        devices = [world.device(number) for number in (1, 2)]
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        edge = uplink(world)
        task = world.task(min_cohort=3)
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            world.until(lambda: all(agent.rounds and agent.rounds[-1].step == "closed" for agent in devices))
        assert world.operator.tasks.get(task.task_id).state == "completed"
        np.testing.assert_array_equal(world.weights(task), world.averaged([1, 2, 3, 4, 5, 6, 7]))
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        assert (len(above.survivors), edge.device_id in above.survivors) == (3, True)
        row = world.rows()[-1]
        assert (row.state, row.devices, row.round_id) == ("counted", 2, above.round_id)
        own = world.edge_operator.rounds.get(row.local_round)
        assert (own.phase, own.weights_out, len(own.survivors)) == ("committed", None, 2)
        entries = [agent.rounds[-1] for agent in devices]
        assert {(entry.result, entry.origin) for entry in entries} == {("took_part", above.round_id)}
        assert world.edge_operator.tasks.get(task.task_id).upstream
