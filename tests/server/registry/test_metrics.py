"""What the rounds of a task came to, as a list for scripts and plots."""

from __future__ import annotations

from typing import Any

import pytest

from archipel.protocol.uploads import metric_arrays
from tests.server.rounds.test_evaluation_and_analytics import RANGES, take_part
from tests.server.rounds.test_plain_rounds import update
from tests.support.world import World


def metrics(world: World, task: dict[str, Any], query: str = "") -> dict[str, Any]:
    status, answer = world.operator("GET", f"/v1/tasks/{task['task_id']}/metrics{query}")
    assert status == 200, answer
    return answer


@pytest.mark.sampled(every=3)
def test_of_training_the_cohort_and_the_sum_of_weights(world: World) -> None:
    task = world.create_task(privacy="plain", threshold=None, cohort=3, rounds=3, deadlines={"updating": 5})
    devices = world.add_devices(3)
    for number in range(4):
        world.clock.now += 1
        world.start_round(devices)
        if number == 1:  # a round that fails is none
            world.clock.now += 6
        else:
            for index, device in enumerate(devices):
                device.updating(**update(index))
        world.settle()
    rounds = [each for each in world.rounds(task["task_id"]) if each["phase"] == "committed"]
    page = metrics(world, task, "?limit=2")
    items = page["items"] + metrics(world, task, f"?limit=2&after={page['next']}")["items"]
    assert [each["round_id"] for each in items] == [each["round_id"] for each in rounds]
    assert [(each["number"], each["devices"], each["result"]) for each in items] == [(n, 3, None) for n in (1, 2, 3)]
    for item, made in zip(items, rounds):
        assert (item["weight_sum"], item["weights_out"]) == (made["weight_sum"], made["weights_out"])
        assert item["weight_sum"] > 0


@pytest.mark.parametrize("kind", ["evaluation", "analytics"])
@pytest.mark.sampled(every=4)
def test_of_the_others_the_result(world: World, kind: str) -> None:
    settings = {"metrics": RANGES, "max_examples": 100} if kind == "evaluation" else {}
    task = world.create_task(kind=kind, privacy="plain", cohort=3, threshold=None, **settings)
    assert metrics(world, task) == {"items": [], "next": None}
    devices = world.add_devices(3)
    one = (
        metric_arrays({"loss": 0.5, "accuracy": 0.75}, RANGES, 50, 100)
        if kind == "evaluation"
        else {"light/sum": 10.0, "light/count": 5.0, "hours/histogram": [1, 2, 3, 4]}
    )
    take_part(world, devices, [one] * 3)
    [item] = metrics(world, task)["items"]
    assert (item["devices"], item["weights_out"]) == (3, None)
    assert item["result"] == world.rounds(task["task_id"])[0]["result"]
    if kind == "evaluation":
        assert item["result"]["metrics"] == pytest.approx({"loss": 0.5, "accuracy": 0.75})
        assert item["result"]["examples"] == pytest.approx(150)
    else:
        assert item["result"]["statistics"]["light"]["value"] == 2.0
