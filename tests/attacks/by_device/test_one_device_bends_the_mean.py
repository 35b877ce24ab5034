"""One device of a plain round, or of one of its secure groups, wants the model to go the opposite way.

It sends the others' change with the other sign, and as large as the bounds of an update let it. So no check refuses it,
and the mean goes where it wants. What stops it: a robust rule in place of the mean, over the single updates or over the
sums of the groups, of which it spoils one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.attacks.faults_world import *  # noqa: F403
from tests.server.rounds.test_plain_rounds import Update, parameters
from tests.server.rounds.test_secure_groups import answer, begin
from tests.support.tiny_bundle import DELTA_STEP, WEIGHT_STEP
from tests.support.world import World

WAY = np.array([0.3, -0.2, 0.4, 0.1, -0.3, 0.2, 0.5, -0.1])
"""Where honest devices go, but for a tenth of it each."""
LARGE = 40.0


def changes(count: int) -> list[np.ndarray]:
    """The first is the attacker's."""
    generator = np.random.default_rng(4)
    return [-LARGE * WAY, *(WAY + 0.03 * generator.normal(size=8) for _ in range(count - 1))]


def plain(change: np.ndarray) -> Update:
    return {"w.update": change[:6].reshape(3, 2), "b.update": change[6:], "weight": np.array(1.0)}


def moved(world: World, task: dict[str, Any]) -> float:
    """How far the model went in the honest direction; 1: as far as honest devices."""
    found = parameters(world, task)
    made = np.concatenate([found["w"].reshape(-1), found["b"]])
    return float(made @ WAY / (WAY @ WAY))


@pytest.mark.parametrize(
    ("aggregation", "follows"),
    [
        ({"rule": "mean"}, True),
        ({"rule": "median", "tolerated": 1}, False),
        ({"rule": "krum", "tolerated": 1}, False),
        ({"rule": "trimmed-mean", "tolerated": 1, "mixing": "nnm"}, False),
    ],
)
@pytest.mark.sampled(every=6)
def test_one_update_of_a_plain_round(world: World, aggregation: dict[str, Any], follows: bool) -> None:
    task = world.create_task(privacy="plain", threshold=None, aggregation=aggregation)
    devices = world.add_devices(5)
    world.start_round(devices)
    for device, change in zip(devices, changes(5)):
        device.updating(**plain(change))
    world.settle()
    assert world.rounds(task["task_id"])[0]["phase"] == "committed"
    assert moved(world, task) == pytest.approx((4 - LARGE) / 5 if follows else 1.0, abs=0.2)


@pytest.mark.parametrize(("rule", "tolerated", "follows"), [("mean", 0, True), ("median", 1, False)])
@pytest.mark.sampled(every=4)
def test_one_device_of_a_secure_group(world: World, rule: str, tolerated: int, follows: bool) -> None:
    asked = {"rule": rule, "tolerated": tolerated}
    task = world.create_task(min_cohort=3, cohort=9, threshold=2, secure_groups=3, aggregation=asked)
    devices = world.add_devices(9)
    begin(world, devices)
    for device, change in zip(devices, changes(9)):
        assert device.plan is not None
        vector = np.append(np.rint(change / DELTA_STEP), round(1 / WEIGHT_STEP)).astype(np.int64)
        device.vector = (vector % 2**device.plan.modulus_bits).astype(np.uint32)
    answer(world, devices)
    assert {each["phase"] for each in world.rounds(task["task_id"])} == {"committed"}
    assert moved(world, task) == pytest.approx((8 - LARGE) / 9 if follows else 1.0, abs=0.2)
