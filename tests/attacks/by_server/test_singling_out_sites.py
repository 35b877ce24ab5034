"""Somebody with the results of a tree's evaluations and analyses wants those of few devices, or of one site.

An edge server gives no sum of fewer devices with examples than the policy wants, and the root keeps none of sites that
cannot have so many. Sums that differ by one device, or by one site, are neither begun nor, where the servers skip their
rules, confirmed: each device remembers the devices that it was in a sum with, and each edge server the sites.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.client import Agent, AgentConfig
from archipel.protocol.operator.tasks import TaskInfo
from archipel.server.database.tables import CheckInRow
from archipel.server.devices import queries
from tests.edge.test_evaluations import ASK, BOUND, STEP, ended, mean
from tests.edge.test_rounds import uplink
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world
from tests.support.tree import QUICK


def device_without_examples(world: EdgeWorld) -> Agent:
    nothing = {"x": np.zeros((0, 3), np.float32), "y": np.zeros(0, np.float32)}
    config = AgentConfig(folder=world.folder / "device-9", **QUICK)
    agent = Agent(config, examples=lambda: nothing, on_event=world.events.append)
    agent.enrol(world.device_token())
    world.agents.append(agent)
    return agent


def waiting_sites(world: EdgeWorld) -> int:
    with world.root._services.database.read() as session:
        return session.query(CheckInRow).filter(CheckInRow.round_id.is_(None)).count()


@pytest.mark.sampled(every=4)
def test_a_site_with_too_few_contributors_gives_no_sum(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, min_contributors=2) as world:
        world.device(1)
        device_without_examples(world)
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        edge = uplink(world)
        with world.running():
            world.until(lambda: waiting_sites(world) == 3)
            task = world.task(**{**ASK, "min_cohort": 2})
            assert ended(world, task).state == "completed"
            world.until(lambda: edge.rounds[-1].step == "closed")
        assert (edge.rounds[-1].result, edge.rounds[-1].masked) == ("dropped", None)
        assert "fewer than 2 of the devices had examples (min_contributors)" in edge.rounds[-1].reason
        # Neither server has a number of it.
        [own] = list(world.edge_operator.tasks.rounds(task.task_id))
        assert (own.phase, own.result) == ("failed", None)
        [row] = world.rows()
        assert (row.state, row.sum_digest, row.devices) == ("given_up", None, None)
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        assert above.result is not None
        assert (above.result.devices, above.result.contributors) == (5, 5)
        assert above.result.metrics["mse"] == pytest.approx(mean([3, 4, 5, 6, 7]), abs=5 * 3 * BOUND * STEP)


@pytest.mark.sampled(every=4)
def test_sites_that_cannot_all_have_enough_contributors_give_no_result(tmp_path: Path) -> None:
    def one_contributor(total: np.ndarray, devices: int) -> tuple[np.ndarray, int]:
        # The last entry counts the devices with examples.
        return total - np.eye(len(total), dtype=np.int64)[-1], devices

    with open_edge_world(tmp_path, min_contributors=2) as world:
        world.site("a", ComputedSite([1, 2], one_contributor))
        world.site("b", ComputedSite([3, 4]))
        world.site("c", ComputedSite([6, 7]))
        with world.running():
            task = world.task(**ASK)
            world.until(lambda: [each for each in world.rounds(task) if each.phase == "failed"])
        [failed, *_] = world.rounds(task)
        assert "fewer than 2 of the devices of some site had examples" in failed.reason
        assert (failed.result, failed.weight_sum) == (None, None)


def first_evaluation(world: EdgeWorld) -> tuple[list[Agent], Any]:
    """Of all sites, and of three devices of the edge; the devices, and the edge's agent."""
    devices = [world.device(number) for number in (1, 2, 3)]
    world.site("b", ComputedSite([4, 5]))
    world.site("c", ComputedSite([6, 7]))
    edge = uplink(world)
    with world.running():
        first = world.task(**ASK, name="first")
        assert ended(world, first).state == "completed"
        world.until(lambda: world.edge_operator.tasks.get(first.task_id).rounds_committed)
    [above] = [each for each in world.rounds(first) if each.phase == "committed"]
    assert above.result is not None
    assert above.result.devices == 7
    return devices, edge


def nobody_waits(world: EdgeWorld) -> bool:
    """Whether the edge takes nobody for waiting who has stopped."""
    with world.edge._services.database.read() as session:
        return all(row.due < time.time() - world.edge.settings.check_in_window for row in session.query(CheckInRow))


@pytest.mark.parametrize("kind", ["evaluation", "analytics"])
@pytest.mark.sampled(every=4)
def test_a_query_without_one_of_the_devices_is_not_begun(tmp_path: Path, kind: str) -> None:
    with open_edge_world(tmp_path, cohort=3, min_contributors=2) as world:
        devices, _ = first_evaluation(world)
        deadlines = {"assigning": 10.0, "advertising": 3.0}
        world.until(lambda: nobody_waits(world))
        with world.running([agent for agent in world.agents if agent is not devices[2]]):
            asked = ASK if kind == "evaluation" else {"kind": kind}
            second = world.task(**{**asked, "min_cohort": 2, "deadlines": deadlines}, name="less-one")
            world.until(lambda: [each for each in world.rounds(second) if each.phase == "failed"])
        # The edge asked nobody, and the root does not tell of the edge by leaving it out.
        assert list(world.edge_operator.tasks.rounds(second.task_id)) == []
        assert [len(agent.rounds) for agent in devices] == [1, 1, 1]
        assert "would tell of 1 edge server alone, at least 2 are needed" in world.rounds(second)[0].reason
        assert all(each.result is None for each in world.rounds(second))


@pytest.mark.sampled(every=4)
def test_devices_and_sites_refuse_though_the_servers_skip_their_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_edge_world(tmp_path, cohort=3, min_contributors=2) as world:
        devices, edge = first_evaluation(world)
        monkeypatch.setattr(queries, "choose", lambda session, task, waiting, fewest, *, now: list(waiting))
        monkeypatch.setattr(queries, "conflict", lambda session, current, task, *, now: "")
        sites = [agent for agent in world.agents if agent not in (*devices, edge)]

        def refused(task: TaskInfo, agents: list[Agent]) -> None:
            world.until(lambda: all("differ by 1 from" in agent.rounds[-1].reason for agent in agents))
            world.until(lambda: [each for each in world.rounds(task) if each.phase == "failed"])
            world.operator.tasks.cancel(task.task_id)
            assert all(each.phase != "committed" for each in world.rounds(task))

        with world.running([agent for agent in world.agents if agent is not devices[2]]):
            refused(world.task(**ASK, name="without-a-device"), devices[:2])
            world.until(lambda: edge.rounds[-1].step == "closed")
        assert (edge.rounds[-1].result, edge.rounds[-1].masked) == ("dropped", None)
        with world.running(sites):
            refused(world.task(**{**ASK, "min_cohort": 2, "cohort": 2}, name="without-a-site"), sites)
