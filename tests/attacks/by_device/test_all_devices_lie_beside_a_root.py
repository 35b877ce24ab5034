"""All devices of a plain round's cohort agree on a lie, beside one device that the operator trusts.

No rule that looks at the cohort alone can tell: the lie is what all of them say. FLTrust compares each update with the
trusted device's: updates that point away from it count nothing, and those that point as it does count with its length.
A device that is no longer trusted makes no version, nor does a round that its own device did not take part in.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.attacks.by_device.test_one_device_bends_the_mean import LARGE, WAY, plain
from tests.attacks.faults_world import *  # noqa: F403
from tests.server.rounds.test_plain_rounds import parameters
from tests.support.world import World

ASIDE = np.array([0.2, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
"""At right angles to WAY."""


def made(world: World, lie: np.ndarray, *, rule: str = "fltrust") -> np.ndarray:
    """What a round makes of a cohort that sends this alone."""
    root, *devices = world.add_devices(6)
    aggregation = {"rule": rule, "root": root.id} if rule == "fltrust" else {"rule": rule, "tolerated": 2}
    task = world.create_task(privacy="plain", threshold=None, cohort=5, min_cohort=5, aggregation=aggregation)
    there = [root, *devices] if rule == "fltrust" else devices
    world.start_round(there)
    for device in there:
        device.updating(**plain(WAY if device is root else lie))
    world.settle()
    assert world.rounds(task["task_id"])[0]["phase"] == "committed"
    found = parameters(world, task)
    return np.concatenate([found["w"].reshape(-1), found["b"]])


@pytest.mark.parametrize(
    "lie", [-WAY, -LARGE * WAY, LARGE * (ASIDE - 0.01 * WAY)], ids=["flipped", "flipped and long", "just away"]
)
@pytest.mark.sampled(every=4)
def test_a_lie_that_points_away_from_the_trusted_update_moves_nothing(world: World, lie: np.ndarray) -> None:
    np.testing.assert_array_equal(made(world, lie), np.zeros(8))


@pytest.mark.parametrize("lie", [LARGE * WAY, LARGE * (WAY + 3 * ASIDE)], ids=["longer", "longer and bent"])
@pytest.mark.sampled(every=4)
def test_a_lie_that_does_moves_the_model_no_further_than_the_trusted_update(world: World, lie: np.ndarray) -> None:
    moved = made(world, lie)
    assert np.linalg.norm(moved) <= np.linalg.norm(WAY) * (1 + 1e-6)
    assert moved @ WAY > 0


@pytest.mark.sampled(every=4)
def test_a_rule_over_the_cohort_alone_follows_the_lie(world: World) -> None:
    np.testing.assert_allclose(made(world, -LARGE * WAY, rule="median"), -LARGE * WAY, rtol=1e-5)


@pytest.mark.sampled(every=4)
def test_a_device_of_the_cohort_cannot_take_the_place_of_the_trusted_one(world: World) -> None:
    """The trusted device leaves, as if it had been pushed off the network; what the others sent makes no version."""
    root, *devices = world.add_devices(6)
    task = world.create_task(
        privacy="plain", threshold=None, cohort=5, min_cohort=5, aggregation={"rule": "fltrust", "root": root.id}
    )
    world.start_round([root, *devices])
    for device in devices:
        device.updating(**plain(-LARGE * WAY))
    world.clock.now += 181
    world.settle()
    shown = world.rounds(task["task_id"])[0]
    assert (shown["phase"], shown["weights_out"]) == ("failed", None)
    assert "root device has sent no update" in shown["reason"]
    # Nor do the others learn which device it is.
    told = devices[0].status().reason
    assert (told, root.id in told) == (shown["reason"], False)


@pytest.mark.sampled(every=4)
def test_a_trusted_device_that_was_stolen_and_revoked_makes_no_version(world: World) -> None:
    root, *devices = world.add_devices(6)
    task = world.create_task(
        privacy="plain", threshold=None, cohort=5, min_cohort=5, aggregation={"rule": "fltrust", "root": root.id}
    )
    world.start_round([root, *devices])
    for device in (root, *devices):
        device.updating(**plain(-LARGE * WAY))
    assert world.operator("POST", f"/v1/devices/{root.id}/revoke")[0] == 200
    world.settle()
    assert world.rounds(task["task_id"])[0]["weights_out"] is None
    assert world.task(task["task_id"])["state"] == "failed"
