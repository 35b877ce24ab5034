"""`evaluation_noise`: the evaluations of a training's versions have noise, and its account has room for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archipel.privacy import Gaussian, Repeated, spent_epsilon
from archipel.protocol.uploads import metric_arrays
from tests.server.rounds.noisy import central, equal_weights, run_round
from tests.server.rounds.test_evaluating import metrics
from tests.server.rounds.test_evaluation_and_analytics import RANGES, take_part
from tests.support.world import World

SECURE: dict[str, Any] = {"cohort": 3, "threshold": None, "metrics": RANGES, "max_examples": 100}


@pytest.mark.sampled(every=6)
def test_a_training_and_its_evaluations_cost_what_the_training_may(world: World, tmp_path: Path) -> None:
    equal_weights(world, tmp_path / "bundle")
    epsilon = 200.0
    wanted = central(None, epsilon=epsilon)
    alone = world.create_task(rounds=4, differential_privacy=wanted, cohort=3)["differential_privacy"]
    world.operator("POST", f"/v1/tasks/{world.operator('GET', '/v1/tasks')[1]['items'][0]['task_id']}/cancel")
    task = world.create_task(
        rounds=4, evaluate_every=2, evaluation_noise=central(0.1), differential_privacy=wanted, **SECURE
    )
    multiplier = task["differential_privacy"]["noise_multiplier"]
    assert multiplier > alone["noise_multiplier"]
    # All of it together, by the events themselves: four rounds and two evaluations.
    events = [Repeated(event=Gaussian(noise_multiplier=multiplier), count=4),
              Repeated(event=Gaussian(noise_multiplier=0.1), count=2)]  # fmt: skip
    whole = spent_epsilon(events, 1e-5)
    assert 0.99 * epsilon < whole <= epsilon
    devices = world.add_devices(3)
    for number in range(1, 5):
        world.clock.now += 1
        run_round(world, devices)
        if number % 2 == 0:
            shown = metrics(world, task)[number - 1]
            evaluation = world.task(shown["evaluation"])
            # Its own limit is the training's, as all of them pay into one account.
            noise = evaluation["differential_privacy"]
            assert (noise["noise_multiplier"], noise["epsilon"], noise["delta"]) == (0.1, epsilon, 1e-5)
            world.clock.now += 1
            take_part(world, devices, [metric_arrays({"loss": 0.5, "accuracy": 0.75}, RANGES, 100, 100)] * 3)
            [round_] = world.rounds(evaluation["task_id"])
            assert round_["result"]["noise"]["accuracy"] > 0
    assert world.task(task["task_id"])["state"] == "completed"
    spent = world.task(task["task_id"])["privacy_spent"]
    assert (spent["releases"], spent["exact"]) == (6, 0)
    assert spent["epsilon"] == pytest.approx(whole)


@pytest.mark.sampled(every=4)
def test_an_evaluation_that_the_account_has_no_room_for_ends_and_its_training_goes_on(
    world: World, tmp_path: Path
) -> None:
    equal_weights(world, tmp_path / "bundle")
    one = spent_epsilon([Gaussian(noise_multiplier=1.0)], 1e-5)
    task = world.create_task(
        rounds=2, evaluate_every=1, evaluation_noise=central(1.0, epsilon=0.9 * one),
        differential_privacy=central(100.0), **SECURE,
    )  # fmt: skip
    devices = world.add_devices(3)
    run_round(world, devices)
    world.clock.now += 1
    run_round(world, devices)
    evaluation = world.task(metrics(world, task)[0]["evaluation"])
    assert evaluation["state"] == "failed"
    assert "is allowed" in evaluation["reason"]
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluate_every": 1, "evaluation_noise": central(None, epsilon=1.0)}, "noise_multiplier is missing"),
        (
            {"evaluation_noise": central(1.0), "metrics": {}},
            "evaluation_noise: is for the evaluations that evaluate_every",
        ),
        (
            {"evaluate_every": 1, "evaluation_noise": {"mechanism": "distributed", "noise_multiplier": 1.0}},
            "evaluate_every: mechanism 'distributed': is for trainings",
        ),
        (
            {"kind": "evaluation", "evaluation_noise": central(1.0)},
            "evaluation_noise: belongs to tasks of kind training",
        ),
        (
            {"evaluate_every": 1, "evaluation_noise": central(1.0), "privacy": "plain"},
            "evaluate_every: mechanism 'central': noise is added to whole numbers",
        ),
    ],
)
@pytest.mark.sampled(every=6)
def test_noise_that_no_evaluation_can_have_is_refused(world: World, changes: dict[str, Any], said: str) -> None:
    values = {"name": "x", "population": "pupils", "rounds": 2, "min_cohort": 3, **SECURE, **changes}
    status, answer = world.operator("POST", "/v1/tasks", {"bundle": world.publish(), **values})
    assert (status, said in answer["detail"]) == (422, True), answer
