"""The upstream server is away for longer than a phase: the edge goes on, and delivers its sum once or not at all."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from archipel.client import Agent
from archipel.operator import TaskRequest
from archipel.protocol.operator.tasks import TaskInfo
from archipel.server.processes.coordinator import Coordinator
from tests.edge.test_rounds import uplink
from tests.support.edge_world import AT_EDGE, TIMES, ComputedSite, EdgeWorld, open_edge_world

LONGER = TIMES["masking"] + 1
"""Than any of the phases behind the first."""


def begin(world: EdgeWorld, **deadlines: float) -> tuple[TaskInfo, list[Agent], Agent]:
    devices = [world.device(number) for number in (1, 2)]
    world.site("b", ComputedSite([3, 4, 5]))
    world.site("c", ComputedSite([6, 7]))
    edge = uplink(world)
    return world.task(min_cohort=3, deadlines={**TIMES, **deadlines}), devices, edge


@pytest.mark.sampled(every=6)
def test_a_sum_that_is_made_meanwhile_is_delivered_when_the_upstream_is_back(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task, devices, edge = begin(world, advertising=30.0)
        with world.running():
            world.until(lambda: [row for row in world.rows() if row.state == "open"])
            world.root.stop()
            away = time.monotonic()
            world.until(lambda: [row for row in world.rows() if row.state == "summed"])
            assert [entry.step for agent in devices for entry in agent.rounds] == ["unmasking"] * 2
            # The edge serves its own devices all the while, also with tasks of its own.
            assert world.edge_operator.tasks.get(task.task_id).state == "running"
            time.sleep(max(0.0, LONGER - (time.monotonic() - away)))
            world.root.start()
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            world.until(lambda: all(agent.rounds[-1].step == "closed" for agent in devices))
        [above] = world.rounds(task)
        assert (above.phase, edge.device_id in above.survivors) == ("committed", True)
        np.testing.assert_array_equal(world.weights(task), world.averaged([1, 2, 3, 4, 5, 6, 7]))
        assert [row.state for row in world.rows()] == ["counted"]
        assert [agent.rounds[-1].result for agent in devices] == ["took_part"] * 2


@pytest.mark.sampled(every=5)
def test_a_sum_that_comes_too_late_is_given_up_and_a_later_round_counts_the_devices_once(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task, devices, edge = begin(world, advertising=TIMES["masking"])
        with world.running():
            world.until(lambda: [row for row in world.rows() if row.state == "open"])
            # The first phase is the longest: the other sites have to be there before LONGER is too late.
            world.until(lambda: world.rounds(task)[0].phase != "assigning")
            world.root.stop()
            world.until(lambda: [row for row in world.rows() if row.state == "summed"])
            time.sleep(LONGER)
            # Whether a sum or the coordinator comes first when a server is back is chance; here it is the coordinator.
            coordinator = Coordinator(world.root._services)
            while coordinator.step():
                pass
            world.root.start()
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running", 240.0)
            world.until(lambda: all(agent.rounds[-1].step == "closed" for agent in devices))
        assert world.operator.tasks.get(task.task_id).state == "completed"
        first, *_, last = world.rounds(task)
        assert (first.phase, last.phase) == ("failed", "committed")
        states = {row.round_id: row.state for row in world.rows()}
        assert (states[first.round_id], states[last.round_id]) == ("given_up", "counted")
        assert edge.device_id in last.survivors
        np.testing.assert_array_equal(world.weights(task), world.averaged([1, 2, 3, 4, 5, 6, 7]))
        for agent in devices:
            assert [entry.result for entry in agent.rounds].count("took_part") == 1


@pytest.mark.sampled(every=5)
def test_without_its_upstream_an_edge_evaluates_what_it_has(tmp_path: Path) -> None:
    with open_edge_world(tmp_path) as world:
        task, devices, _ = begin(world, advertising=20.0)
        with world.running():
            world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
            world.until(lambda: all(agent.rounds[-1].step == "closed" for agent in devices))
        row = world.rows()[-1]
        world.root.stop()
        own = world.edge_operator.tasks.create(
            TaskRequest(
                name="look", population=AT_EDGE, bundle=task.bundle, rounds=1, min_cohort=2, cohort=2, threshold=2,
                kind="evaluation", metrics={"mse": 256.0}, max_examples=100, deadlines=TIMES,
                weights=world.edge_operator.rounds.get(row.local_round or "").weights_in,
            )
        )  # fmt: skip
        with world.running(devices):
            world.until(lambda: world.edge_operator.tasks.get(own.task_id).state != "running")
        assert world.edge_operator.tasks.get(own.task_id).state == "completed"
        assert [agent.rounds[-1].kind for agent in devices] == ["evaluation"] * 2
        world.root.start()
