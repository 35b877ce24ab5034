"""Evaluations and analyses with the server's noise: what they tell, what it costs, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from archipel.bundle.roles import Update
from archipel.errors import PolicyError
from archipel.privacy import Gaussian, Repeated, spent_epsilon
from archipel.privacy.queries import add_noise, blocks, check_query, deviations
from archipel.protocol.messages import Bins
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.uploads import contribution, metric_arrays
from archipel.protocol.vector import DecodedSum, Layout
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.rounds.checks import layout_of
from tests.server.rounds.noisy import central
from tests.server.rounds.test_evaluation_and_analytics import RANGES, take_part
from tests.server.rounds.test_noisy_rounds import open_manifest
from tests.support.world import World

STEP = 1 / (2**15 - 1)


def refused(world: World, message: str, **settings: Any) -> None:
    values = {"name": "x", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 3, **settings}
    status, answer = world.operator("POST", "/v1/tasks", {"bundle": world.publish(), **values})
    assert status == 422
    assert message in str(answer), answer


def evaluation(world: World, count: int, **settings: Any) -> dict[str, Any]:
    given = {"kind": "evaluation", "metrics": RANGES, "max_examples": 200, "cohort": count, "threshold": None}
    return world.create_task(**{**given, **settings})


def evaluate(world: World, devices: list[Any], bins: dict[str, Bins] | None = None) -> None:
    take_part(world, devices, [metric_arrays({"loss": 0.5, "accuracy": 0.75}, RANGES, 200, 200, bins)] * len(devices))


@pytest.mark.sampled(every=4)
def test_the_noise_of_each_entry_is_as_large_as_one_device_and_the_number_of_entries_say(world: World) -> None:
    """By hand: accuracy, loss, both clamped shares, the examples and the contributors are k = 6 blocks."""
    task = evaluation(world, 3)
    world.add_devices(3)
    with world.services.database.read() as session:
        layout = layout_of(request_of(session.get_one(Task, task["task_id"])), open_manifest(world))
    assert len(blocks(layout)) == 6
    sizes = deviations(layout, 2.0)
    expected = math.ceil(2.0 * math.sqrt(6) * (2**15 - 1))
    assert {sizes[name] for name in sizes if not name.endswith("contributors")} == {expected}
    assert sizes["archipel/contributors"] == math.ceil(2.0 * math.sqrt(6))
    # One device changes entry i by D_i at most: the account of all is that of one Gaussian of multiplier 2.
    most = {name: 1 if name.endswith("contributors") else 2**15 - 1 for name in sizes}
    assert sum((most[name] / sizes[name]) ** 2 for name in sizes) <= 1 / 2.0**2
    zero = {port: np.zeros(tuple(map(int, port.shape))) for port in layout.updates}
    drawn = [add_noise(DecodedSum.of(zero), layout, cohort=10**6, multiplier=2.0) for _ in range(400)]
    losses = np.array([float(each.values["loss"]) for each in drawn]) / (8 * STEP)
    np.testing.assert_allclose(losses, np.rint(losses), atol=1e-3)
    assert losses.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(losses)))
    # Counts of devices are from 0 on.
    assert min(float(each.values["archipel/contributors"]) for each in drawn) == 0


def test_a_histogram_of_devices_is_one_entry_that_a_device_changes_by_one(world: World) -> None:
    task = evaluation(world, 11, min_cohort=11, distributions={"accuracy": "default"}, differential_privacy=central(9))
    with world.services.database.read() as session:
        layout = layout_of(request_of(session.get_one(Task, task["task_id"])), open_manifest(world))
    [bins] = [each for each in blocks(layout) if each.ports[0].name.startswith("archipel/bins/")]
    assert (len(blocks(layout)), bins.most) == (7, 1.0)


@pytest.mark.sampled(every=4)
def test_a_noisy_evaluation_tells_near_the_truth_and_pays_for_it(world: World) -> None:
    task = evaluation(world, 4, rounds=2, differential_privacy=central(0.01, delta=1e-6))
    devices = world.add_devices(4)
    evaluate(world, devices)
    [shown] = world.rounds(task["task_id"])
    result = shown["result"]
    # Noise of 0.01 sqrt(6) on sums of 4: far below what is asked for here, and never none.
    for name, exact, bound in (("loss", 0.5, 8.0), ("accuracy", 0.75, 1.0)):
        deviation = math.hypot(bound, exact) * 0.01 * math.sqrt(6) / 4
        assert result["noise"][name] == pytest.approx(deviation, rel=0.2)
        assert 0 < abs(result["metrics"][name] - exact) < 6 * deviation
    assert result["devices"] == 4
    assert shown["weight_sum"] is None
    with world.services.database.read() as session:
        [row] = session.query(PrivacyEvent)
        assert (row.population, row.model) == ("pupils", "tiny")
        assert json.loads(row.event) == [{"type": "gaussian", "noise_multiplier": 0.01}]
    spent = world.task(task["task_id"])["privacy_spent"]
    assert spent["epsilon"] == pytest.approx(spent_epsilon([Gaussian(noise_multiplier=0.01)], 1e-6))
    assert spent["exact"] == 0


@pytest.mark.sampled(every=4)
def test_much_noise_leaves_metrics_in_their_ranges_and_counts_of_devices_possible(world: World) -> None:
    task = evaluation(world, 4, differential_privacy=central(50.0))
    evaluate(world, world.add_devices(4))
    [shown] = world.rounds(task["task_id"])
    result = shown["result"]
    assert 0 <= result["contributors"] <= 4
    assert all(abs(value) <= RANGES[name] for name, value in result["metrics"].items())


@pytest.mark.sampled(every=4)
def test_an_analysis_pays_into_the_same_account_and_its_quantiles_come_from_noisy_counts(world: World) -> None:
    task = world.create_task(kind="analytics", cohort=3, threshold=None, differential_privacy=central(1e-5))
    histograms = [[1, 4, 0, 0], [0, 2, 2, 0], [0, 0, 6, 1]]
    take_part(
        world, world.add_devices(3),
        [{"light/sum": 10.0 * (i + 1), "light/count": 5.0, "hours/histogram": each}
         for i, each in enumerate(histograms)],
    )  # fmt: skip
    [shown] = world.rounds(task["task_id"])
    result = shown["result"]
    counts, error = np.array(result["values"]["hours/histogram"]), result["noise"]["hours/histogram"]
    assert 0 < np.abs(counts - [1, 6, 8, 1]).max() < 6 * error
    assert set(result["statistics"]["hours"]["quantiles"]) == {"0.25", "0.5", "1.0"}
    assert result["statistics"]["hours"]["counts"] == result["values"]["hours/histogram"]
    spent = world.task(task["task_id"])["privacy_spent"]
    assert (spent["model"], spent["releases"]) == ("tiny", 1)


@pytest.mark.sampled(every=6)
def test_the_noisy_number_of_contributors_decides_about_no_later_query(world: World) -> None:
    """Two of five devices have no examples, and noise says that all have. An exact query of them and of three others
    is not refused for the one contributor that would then be left."""
    devices = world.add_devices(5)
    arrays = [metric_arrays({"loss": 0.5, "accuracy": 0.75}, RANGES, 200 * (n > 1), 200) for n in range(8)]
    noisy = evaluation(world, 5, min_contributors=3, differential_privacy=central(1000.0))
    take_part(world, devices, [{**each, **contribution(200 * (n > 1))} for n, each in enumerate(arrays[:5])])
    with world.services.database.write() as session:
        [row] = session.query(Round).filter(Round.task_id == noisy["task_id"])
        row.result = {**row.result, "contributors": 5}
    exact = evaluation(world, 8, min_cohort=8, min_contributors=3, name="exact")
    take_part(world, [*devices, *world.add_devices(3)], arrays)
    [shown] = world.rounds(exact["task_id"])
    assert (shown["phase"], shown["result"]["contributors"]) == ("committed", 6)


@pytest.mark.sampled(every=4)
def test_noise_releases_nothing_of_fewer_devices_than_are_needed(world: World) -> None:
    task = evaluation(world, 3, min_contributors=3, differential_privacy=central(1e-3))
    devices = world.add_devices(3)
    world.start_round(devices)
    with world.services.database.read() as session:
        layout = layout_of(request_of(session.get_one(Task, task["task_id"])), open_manifest(world))
    for number, device in enumerate(devices):
        assert device.plan is not None
        given = metric_arrays({"loss": 0.5, "accuracy": 0.75}, RANGES, 200 * (number > 0), 200)
        device.vector = layout.encode(given, modulus_bits=device.plan.modulus_bits, max_cohort=3)
    world.run_to("unmasking", devices)
    for device in devices:
        device.answer("unmasking")
    world.settle()
    [shown] = world.rounds(task["task_id"])
    assert (shown["phase"], shown["result"]) == ("failed", None)
    assert "fewer than 3 of the devices had examples" in shown["reason"]
    # It was looked at, so it has been paid for.
    assert world.task(task["task_id"])["privacy_spent"]["releases"] == 1


@pytest.mark.sampled(every=3)
def test_a_budget_is_checked_before_the_query_runs(world: World) -> None:
    both = spent_epsilon([Repeated(event=Gaussian(noise_multiplier=2.0), count=2)], 1e-5)
    one = spent_epsilon([Gaussian(noise_multiplier=2.0)], 1e-5)
    noise = central(2.0, epsilon=(both + one) / 2)
    task = evaluation(world, 3, rounds=2, differential_privacy=noise)
    devices = world.add_devices(3)
    evaluate(world, devices)
    for device in devices:
        device.check_in()
    world.settle()
    shown = world.task(task["task_id"])
    assert (shown["state"], len(world.rounds(task["task_id"]))) == ("completed", 1)
    assert "is allowed" in shown["reason"]
    # Nobody is asked for what the account has no room for.
    refused(world, "another round would make it", kind="evaluation", metrics=RANGES, differential_privacy=noise)
    with world.services.database.read() as session:
        assert session.query(PrivacyEvent).count() == 1


def test_the_least_noise_for_a_target_is_that_of_the_accountant(world: World) -> None:
    task = evaluation(world, 3, rounds=4, differential_privacy=central(None, epsilon=2.0))
    multiplier = task["differential_privacy"]["noise_multiplier"]
    cost = spent_epsilon([Repeated(event=Gaussian(noise_multiplier=multiplier), count=4)], 1e-5)
    assert 1.99 < cost <= 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": "plain"}, "set privacy to 'secure'"),
        ({"count_adoption": True}, "count_adoption has noise of the devices' own"),
        ({"differential_privacy": {**central(), "clip_noise": 2.0}}, "clip_noise is for trainings"),
        (
            {"differential_privacy": {**central(), "mechanism": "correlated", "separation": 2}},
            "evaluations and analyses have 'central'",
        ),
        ({"differential_privacy": {**central(), "mechanism": "distributed"}}, "have 'central'"),
    ],
)
@pytest.mark.sampled(every=6)
def test_what_noise_does_not_go_with_is_refused_by_name(world: World, settings: dict[str, Any], message: str) -> None:
    refused(world, message, **{"kind": "evaluation", "metrics": RANGES, "differential_privacy": central(), **settings})


@pytest.mark.parametrize(("change", "message"), [({"noise": 0.5}, "already"), ({"kind": "delta"}, "is a delta")])
def test_entries_that_noise_is_not_for_are_named(change: dict[str, Any], message: str) -> None:
    values = {
        "name": "s", "tensor": "s", "dtype": "float32", "shape": (), "kind": "value", "weighting": "uniform",
        "range": 1.0, "bits": 8,
    }  # fmt: skip
    layout = Layout((Update(**{**values, **change}),))
    with pytest.raises(PolicyError, match=message):
        check_query(
            DifferentialPrivacy(mechanism="central", noise_multiplier=1.0), layout, privacy="secure",
            count_adoption=False,
        )  # fmt: skip
