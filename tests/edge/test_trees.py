"""Edge servers below edge servers: the root's model is still that of all the devices."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from archipel.client import Agent, AgentConfig
from archipel.edge.site import EdgeSite
from archipel.edge.uplink import agent_config
from archipel.protocol.identity import root_of
from tests.edge.test_evaluations import ASK, BOUND, STEP, ended, mean
from tests.edge.test_rounds import uplink
from tests.support.edge_world import AT_EDGE, SITES, ComputedSite, open_edge_world
from tests.support.linear_bundle import local_data
from tests.support.tree import QUICK

DEEP = msgspec.structs.replace(SITES, levels=2, max_site_cohort=8)


@pytest.mark.sampled(every=8)
def test_a_round_over_two_levels_of_edge_servers(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, aggregators=DEEP, min_contributors=2) as world:
        # root: the edge and a site; the edge: a ward and a site; the ward: two devices.
        ward = world.add_edge("ward")
        above = world.token("root", "hospitals", "aggregator")
        upstream = ward.settings.upstream
        assert upstream is not None
        config = agent_config(ward._services, upstream)
        values = {name: getattr(config, name) for name in config.__struct_fields__ if name != "attributes"}
        agent = Agent(
            AgentConfig(**{**values, "max_wait": 0.2, "pause_seconds": 0.05}), examples=dict,
            on_event=world.events.append, site=EdgeSite(ward._services, upstream),
        )  # fmt: skip
        agent.enrol(world.token("edge", AT_EDGE, "aggregator", root=root_of(above)))
        world.agents.append(agent)
        devices = []
        for number in (1, 2):
            own = AgentConfig(folder=tmp_path / f"device-{number}", **QUICK)
            device = Agent(own, examples=lambda number=number: local_data(number), on_event=world.events.append)
            device.enrol(world.token("ward", upstream.population, root=root_of(above)))
            devices.append(device)
        world.agents += devices
        world.site("of-edge", ComputedSite([3, 4, 5]), at="edge")
        world.site("of-root", ComputedSite([6, 7, 8]))
        uplink(world)
        # Nobody is missed, so no phase lasts that long: a slow machine may take its time for three levels.
        deadlines = {"assigning": 60.0, "advertising": 120.0}
        task = world.task(levels=2, cohort=2, min_cohort=2, deadlines=deadlines)
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running", 240.0)
            world.until(lambda: all(each.rounds and each.rounds[-1].step == "closed" for each in devices))
        assert world.operator.tasks.get(task.task_id).state == "completed"
        np.testing.assert_array_equal(world.weights(task), world.averaged(list(range(1, 9))))
        assert [device.rounds[-1].result for device in devices] == ["took_part"] * 2
        [root_round] = world.rounds(task)
        assert {device.rounds[-1].origin for device in devices} == {root_round.round_id}
        [row] = world.rows()
        assert (row.devices, row.state) == (5, "counted")
        with world.running():
            asked = {**ASK, "metrics": {"mse": 4 * BOUND}, "min_cohort": 2, "cohort": 2, "deadlines": deadlines}
            evaluation = ended(world, world.task(**asked, levels=2, name="evaluation"))
            world.until(lambda: world.edge_operator.tasks.get(evaluation.task_id).rounds_committed)
        [found] = [each.result for each in world.rounds(evaluation) if each.phase == "committed"]
        assert found is not None
        assert (found.devices, found.contributors) == (8, 8)
        assert found.metrics["mse"] == pytest.approx(mean(list(range(1, 9))), abs=8 * 3 * 4 * BOUND * STEP)
        [middle] = list(world.edge_operator.tasks.rounds(evaluation.task_id))
        assert middle.result is not None
        assert (middle.result.devices, middle.result.contributors, middle.result.metrics) == (5, 5, {})


@pytest.mark.sampled(every=3)
def test_a_deeper_tree_than_the_policy_allows_is_refused(tmp_path: Path) -> None:
    import pytest

    from archipel.errors import RefusedError

    with (
        open_edge_world(tmp_path, aggregators=DEEP) as world,
        pytest.raises(RefusedError, match="3 levels of edge servers, the policy allows 2"),
    ):
        world.task(levels=3)
