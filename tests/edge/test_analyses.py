"""Analyses of a whole tree: the root's statistics are those of all devices, which NumPy computes here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.edge.test_evaluations import ended
from tests.edge.test_rounds import uplink
from tests.support.edge_world import ComputedSite, EdgeWorld, open_edge_world
from tests.support.linear_bundle import local_data
from tests.support.tree import PATIENT

ASK: dict[str, Any] = {"kind": "analytics", "max_examples": 20, "min_cohort": 3, "deadlines": PATIENT}
STEP = 100 / (2**18 - 1)
"""Of the sum of a device's y."""


def values(numbers: list[int]) -> np.ndarray:
    """The y of all examples of these devices."""
    return np.concatenate([local_data(number)["y"] for number in numbers]).astype(np.float64)


def open_sites(world: EdgeWorld) -> None:
    """Devices 1 and 2 at the edge server, 3 to 7 at two other sites."""
    for number in (1, 2):
        world.device(number)
    world.site("b", ComputedSite([3, 4, 5]))
    world.site("c", ComputedSite([6, 7]))
    uplink(world)


@pytest.mark.sampled(every=3)
def test_statistics_are_those_of_all_devices_and_an_edge_tells_none(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, min_contributors=2) as world:
        open_sites(world)
        with world.running():
            task = world.task(**ASK)
            assert ended(world, task).state == "completed"
            world.until(lambda: world.edge_operator.tasks.get(task.task_id).rounds_committed)
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        told, y = above.result, values([1, 2, 3, 4, 5, 6, 7])
        assert told is not None
        assert (told.devices, told.contributors) == (7, 7)
        assert told.statistics["y"].value == pytest.approx(y.mean(), abs=7 * STEP / len(y))
        assert told.statistics["spread"].counts == np.histogram(y, [-np.inf, -1, 0, 1, np.inf])[0].tolist()
        # The edge knows how many of its devices are in it, and tells nothing of what they sent.
        [own] = list(world.edge_operator.tasks.rounds(task.task_id))
        assert own.result is not None
        assert (own.phase, own.result.devices, own.result.contributors) == ("committed", 2, 2)
        assert (own.result.values, own.result.statistics) == ({}, {})


@pytest.mark.sampled(every=4)
def test_an_analysis_and_an_evaluation_share_one_budget(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, min_contributors=2, queries=1) as world:
        open_sites(world)
        with world.running():
            first = world.task(**{**ASK, "kind": "evaluation", "metrics": {"mse": 64.0}})
            assert ended(world, first).state == "completed"
            second = world.task(**ASK)
            world.until(lambda: "queries" in world.operator.tasks.get(second.task_id).waiting_for)
        assert world.rounds(second) == []
