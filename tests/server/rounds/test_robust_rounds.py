"""Plain rounds with a robust rule: the model moves by the rule of the updates that arrived, computed here by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from archipel.server.database.tables import Task
from tests.server.rounds.test_plain_rounds import Update, encoded, parameters, same, update
from tests.support.world import World


def rows(updates: list[Update]) -> Update:
    """`[devices, ...]` by name: what each device changed, without its weight."""
    return {
        name: np.stack([each[f"{name}.update"].astype(np.float64) / float(each["weight"]) for each in updates])
        for name in ("w", "b")
    }


def robust(world: World, rule: str, tolerated: int = 1, **more: Any) -> dict[str, Any]:
    asked = {"rule": rule, "tolerated": tolerated, **more.pop("aggregation", {})}
    return world.create_task(privacy="plain", threshold=None, aggregation=asked, **more)


def run(world: World, devices: list[Any], updates: list[Update]) -> None:
    world.start_round(devices)
    for device, values in zip(devices, updates):
        device.updating(**values)
        world.settle()


@pytest.mark.sampled(every=4)
def test_the_model_moves_by_the_median_of_the_devices_whatever_their_weights(world: World) -> None:
    task = robust(world, "median", tolerated=2, min_cohort=5)
    devices = world.add_devices(5)
    updates = [update(index, 1.0 + index) for index in range(5)]
    run(world, devices, updates)
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], len(shown["survivors"]), shown["weight_sum"]) == ("committed", 5, 15.0)
    same(parameters(world, task), {name: np.median(each, axis=0) for name, each in rows(updates).items()})
    assert world.task(task["task_id"])["aggregation"]["rule"] == "median"
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=4)
def test_single_updates_stay_until_the_round_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is folded, a coordinator that comes new finds all of them, and a late or repeated one changes nothing."""
    monkeypatch.setattr("archipel.server.rounds.folding.BATCH", 2)
    task = robust(world, "trimmed-mean", min_cohort=3, goal=4)
    devices = world.add_devices(5)
    world.start_round(devices)
    updates, files = [update(index, 1.0 + index) for index in range(4)], []
    for device, values in zip(devices, updates):
        device.updating(**values)
        device.updating(**values)
        files.append(len(world.stored("updates")))
        world.settle()
        world.restart_coordinator()
    assert files == [1, 2, 3, 4]
    assert devices[4].try_upload(encoded(update(9)))[0] == 410
    same(parameters(world, task), {name: stats.trim_mean(each, 0.25, axis=0) for name, each in rows(updates).items()})


@pytest.mark.sampled(every=3)
def test_an_update_that_was_lost_fails_the_round(world: World) -> None:
    task = robust(world, "median", min_cohort=3, cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    for index, device in enumerate(devices):
        device.updating(**update(index))
    world.damage(f"updates/{next(iter(world.stored('updates')))}")
    world.settle()
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["weights_out"]) == ("failed", None)
    assert "differ from the acknowledged ones" in shown["reason"]
    run(world, devices, [update(index) for index in range(3)])
    assert world.task(task["task_id"])["state"] == "completed"


def clipped(each: Update, centre: Update | None) -> Update:
    """Centered clipping, three steps from the last aggregate, the first time from the median."""
    flat = np.concatenate([each[name].reshape(len(each[name]), -1) for name in ("w", "b")], axis=1)
    point = np.median(flat, axis=0)
    if centre is not None:
        point = np.concatenate([centre[name].reshape(-1) for name in ("w", "b")])
    for _ in range(3):
        apart = flat - point
        lengths = np.linalg.norm(apart, axis=1)
        point = point + (apart * np.minimum(1, np.median(lengths) / lengths)[:, None]).mean(axis=0)
    return {"w": point[:6].reshape(3, 2), "b": point[6:]}


@pytest.mark.sampled(every=4)
def test_what_a_rule_keeps_is_there_in_the_next_round_and_after_a_crash(world: World) -> None:
    task = robust(world, "centered-clipping", min_cohort=3, cohort=3, rounds=2)
    devices = world.add_devices(3)
    expected, centre = {"w": np.zeros((3, 2)), "b": np.zeros(2)}, None
    for number in range(2):
        updates = [update(10 * number + index, 1.0) for index in range(3)]
        run(world, devices, updates)
        world.restart_coordinator()
        centre = clipped(rows(updates), centre)
        expected = {name: expected[name] + centre[name] for name in centre}
    same(parameters(world, task), expected)
    with world.services.database.read() as session:
        assert session.get_one(Task, task["task_id"]).rule_state is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"privacy": "secure"}, "needs single updates, which secure rounds hide"),
        ({"mode": "asynchronous"}, "asynchronous rounds add up updates of several versions"),
        (
            {"aggregation": {"rule": "median", "tolerated": 2}},
            "3 updates a round are too few to tolerate 2",
        ),
        ({"aggregation": {"rule": "median", "most_bytes": 1000}}, "more than most_bytes, 1,000"),
        ({"kind": "evaluation", "metrics": {"loss": 8.0}}, "aggregation: belongs to tasks of kind training"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_task_whose_rule_does_not_fit_is_refused(world: World, settings: dict[str, Any], words: str) -> None:
    status, answer = ask(world, **settings)
    assert status == 422
    assert words in answer["detail"]


def test_a_task_that_would_keep_more_than_the_server_allows_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = world.app.extensions["archipel"].settings
    monkeypatch.setattr(type(settings), "robust_bytes", 5 * 9 * 28 - 1)  # five devices, nine entries, 28 bytes each
    status, answer = ask(world)
    assert (status, "5 updates of 9 entries take 1,260 bytes" in answer["detail"]) == (422, True), answer
    monkeypatch.setattr(type(settings), "robust_bytes", 5 * 9 * 28)
    assert ask(world)[0] == 201


@pytest.mark.parametrize(
    ("aggregation", "words"),
    [
        ({"rule": "best"}, "rule: there is no 'best'; there are: mean, centered-clipping"),
        ({"rule": "krum", "mixing": "sum"}, "mixing: there is no 'sum'"),
        ({"tolerated": 1}, "the mean tolerates no arbitrary update"),
        ({"rule": "krum", "tolerated": -1}, ">= 0"),
        ({"rule": "krum", "tolerate": 1}, "unknown field"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_request_that_names_no_rule_is_refused_while_it_is_read(
    world: World, aggregation: dict[str, Any], words: str
) -> None:
    status, answer = ask(world, aggregation=aggregation)
    assert status == 400, answer
    assert words in answer["detail"]


def ask(world: World, **settings: Any) -> tuple[int, Any]:
    values = {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5, "privacy": "plain",
        "bundle": world.publish(), "aggregation": {"rule": "median", "tolerated": 1}, **settings,
    }  # fmt: skip
    return world.operator("POST", "/v1/tasks", values)
