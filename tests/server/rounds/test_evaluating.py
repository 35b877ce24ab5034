"""`evaluate_every`: a training's versions are evaluated on the devices of its population."""

from __future__ import annotations

from typing import Any

import pytest

from archipel.protocol.uploads import metric_arrays
from tests.server.http.test_query_rights import create, token
from tests.server.rounds.test_evaluation_and_analytics import RANGES
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import Device
from tests.support.world import World

PLAIN: dict[str, Any] = {"privacy": "plain", "threshold": None, "cohort": 3, "metrics": RANGES, "max_examples": 100}


def train(world: World, devices: list[Device]) -> None:
    """One round; the coordinator is killed before and after it commits."""
    world.clock.now += 1
    world.start_round(devices)
    for index, device in enumerate(devices):
        device.updating(**update(index))
    world.restart_coordinator()
    world.settle()
    world.restart_coordinator()
    world.settle()


def evaluate(world: World, devices: list[Device], loss: float) -> None:
    world.clock.now += 1
    world.start_round(devices)
    for device in devices:
        device.updating(**metric_arrays({"loss": loss, "accuracy": 0.75}, RANGES, 50, 100))
    world.settle()


def metrics(world: World, task: dict[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = world.operator("GET", f"/v1/tasks/{task['task_id']}/metrics")[1]["items"]
    return items


@pytest.mark.sampled(every=3)
def test_every_second_version_is_evaluated_and_training_waits_for_it(world: World) -> None:
    task = world.create_task(rounds=3, evaluate_every=2, **PLAIN)
    devices = world.add_devices(3)
    train(world, devices)
    assert [(each["number"], each["evaluation"]) for each in metrics(world, task)] == [(1, None)]
    train(world, devices)
    _, second = metrics(world, task)
    assert (second["evaluation_state"], second["metrics"]) == ("running", {})
    evaluation = world.task(second["evaluation"])
    assert (evaluation["kind"], evaluation["metrics"], evaluation["rounds"]) == ("evaluation", RANGES, 1)
    assert (evaluation["weights"], evaluation["evaluates"]) == (second["weights_out"], second["round_id"])
    # Devices are waiting again, and the evaluation gets them, not the third round.
    assert world.task(task["task_id"])["waiting_for"] == "waits for the evaluation of version 2"
    evaluate(world, devices, 0.5)
    assert len(world.rounds(task["task_id"])) == 2
    _, second = metrics(world, task)
    assert second["evaluation_state"] == "completed"
    assert second["metrics"] == pytest.approx({"evaluation loss": 0.5, "evaluation accuracy": 0.75})
    train(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"
    assert [each["evaluation"] for each in metrics(world, task)] == [None, second["evaluation"], None]


@pytest.mark.sampled(every=4)
def test_an_evaluation_that_cannot_begin_or_fails_stops_no_training(world: World) -> None:
    task = world.create_task(rounds=3, evaluate_every=1, **PLAIN)
    devices = world.add_devices(3)
    train(world, devices)
    world.clock.now += 59
    world.settle()
    assert metrics(world, task)[0]["evaluation_state"] == "running"
    world.clock.now += 2
    world.settle()
    [first] = metrics(world, task)
    assert first["evaluation_state"] == "failed"
    reason = world.task(first["evaluation"])["reason"]
    assert reason.startswith("no round could begin within 60 s: no device is waiting")
    train(world, devices)
    # This one begins, and no device answers.
    world.clock.now += 1
    world.start_round(devices)
    world.clock.now += 200
    world.settle()
    _, second = metrics(world, task)
    assert second["evaluation_state"] == "failed"
    assert world.task(second["evaluation"])["reason"].startswith("1 rounds in a row failed")
    train(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.sampled(every=4)
def test_cancelling_a_training_cancels_its_evaluation(world: World, begun: bool) -> None:
    task = world.create_task(rounds=3, evaluate_every=1, **PLAIN)
    devices = world.add_devices(3)
    train(world, devices)
    if begun:
        world.clock.now += 1
        world.start_round(devices)
    status, answer = world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    assert (status, answer["state"]) == (200, "cancelled")
    evaluation = world.task(metrics(world, task)[0]["evaluation"])
    assert (evaluation["state"], evaluation["reason"]) == ("cancelled", "its training was cancelled")
    world.settle()
    assert [each["phase"] for each in world.rounds(evaluation["task_id"])] == ["failed"] * begun
    # Its devices are free for another task.
    world.create_task(
        rounds=1, **{name: value for name, value in PLAIN.items() if name not in ("metrics", "max_examples")}
    )
    world.clock.now += 5
    world.start_round(devices)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("server_settings", [{"query_approval": True}])
def test_an_evaluation_that_needs_approval_keeps_nothing_waiting(world: World) -> None:
    task = world.create_task(rounds=2, evaluate_every=1, **PLAIN)
    devices = world.add_devices(3)
    train(world, devices)
    assert metrics(world, task)[0]["evaluation_state"] == "proposed"
    # Whoever asked for the training cannot approve of its questions.
    status, _ = world.operator("POST", f"/v1/tasks/{metrics(world, task)[0]['evaluation']}/approve")
    assert status == 403
    train(world, devices)
    assert world.task(task["task_id"])["state"] == "completed"


def test_trainings_that_would_ask_too_much_are_refused(world: World) -> None:
    admin, operator = token(world, "admin"), token(world, "operator")
    status, answer = create(world, operator, kind="training", evaluate_every=1, **PLAIN)
    assert status == 403, answer
    for changes, said in (
        ({"rounds": 514, "evaluate_every": 2}, "evaluate_every: 2 of 514 rounds makes 257 evaluations; bundle"),
        ({"evaluate_every": 1, "metrics": {"f1": 1.0}}, "evaluate_every: metric 'f1': bundle"),
        ({"evaluate_every": 1, "metrics": {}}, "evaluate_every: metrics: name at least one with its range; bundle"),
        (
            {"evaluate_every": 1, "min_contributors": 9},
            "evaluate_every: the plan is outside the bundle's privacy policy",
        ),
        ({"evaluate_every": 1, "mode": "asynchronous"}, "evaluate_every: the devices of an asynchronous task"),
        ({"metrics": RANGES}, "metrics: belongs to tasks of kind evaluation, this one is of kind training"),
        ({"kind": "evaluation", "evaluate_every": 1}, "evaluate_every: belongs to tasks of kind training"),
    ):
        status, answer = create(world, admin, **{**PLAIN, **changes})
        assert (status, said in answer["detail"]) == (422, True), answer
