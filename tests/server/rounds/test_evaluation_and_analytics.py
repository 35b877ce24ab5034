"""Tasks that make no model: metrics over all examples of a population, and sums of what devices compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import decode_manifest
from archipel.protocol.messages import Bins
from archipel.protocol.uploads import EXAMPLES, adoption, contribution, metric_arrays, plan_layout
from archipel.server.database.tables import BundleRow
from archipel.server.rounds.results import estimate_adoption, quantile
from tests.support.devices import Device
from tests.support.world import World

RANGES = {"loss": 8.0, "accuracy": 1.0}


def take_part(world: World, devices: list[Device], arrays: Sequence[dict[str, Any]]) -> None:
    """Every device uploads its arrays, masked or as they are."""
    world.start_round(devices)
    plan = devices[0].plan
    with world.services.database.read() as session:
        manifest = decode_manifest(session.get(BundleRow, plan.bundle).manifest)
    layout = plan_layout(plan, manifest)
    for device, values in zip(devices, arrays, strict=True):
        values = {name: np.asarray(array, np.float32) for name, array in {**contribution(1), **values}.items()}
        if plan.privacy == "plain":
            device.updating(**values)
        else:
            device.vector = layout.encode(values, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)
    if plan.privacy == "secure":
        world.run_to("unmasking", devices)
        for device in devices:
            device.answer("unmasking")
    world.settle()
    assert devices[0].status().phase == "committed", devices[0].status()


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_an_evaluation_is_the_mean_over_all_examples(world: World, privacy: str) -> None:
    task = world.create_task(
        kind="evaluation", metrics=RANGES, max_examples=200, privacy=privacy, cohort=4, threshold=None
    )
    devices = world.add_devices(4)
    examples = [50, 200, 20, 0]
    losses, hits = [0.5, 0.25, 7.5, 0.0], [0.5, 0.75, 0.25, 0.0]
    take_part(
        world,
        devices,
        [metric_arrays({"loss": a, "accuracy": b}, RANGES, n, 200) for a, b, n in zip(losses, hits, examples)],
    )
    [shown] = world.rounds(task["task_id"])
    result = shown["result"]
    assert (shown["weights_out"], result["devices"], result["contributors"]) == (None, 4, 3)
    total = sum(examples)
    # One step of the fixed-point encoding (16 bits) for each device, of a range of 8 times a weight of up to 1.
    assert result["examples"] == pytest.approx(total, abs=4 * 200 / 2**15)
    for name, values, bound in (("loss", losses, 8.0), ("accuracy", hits, 1.0)):
        expected = sum(n * value for n, value in zip(examples, values)) / total
        assert result["metrics"][name] == pytest.approx(expected, abs=4 * bound / 2**15 * 200 / total)
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_a_distribution_is_that_of_the_devices_values_within_its_error(world: World, privacy: str) -> None:
    """Each device counts once, whatever number of examples it has; one without examples is in no bin."""
    own = Bins(low=0.05, high=4.0, count=30, scale="log", better="lower")
    task = world.create_task(
        kind="evaluation", metrics=RANGES, privacy=privacy, cohort=11, min_cohort=11, threshold=None,
        distributions={"accuracy": "default", "loss": msgspec.to_builtins(own)},
    )  # fmt: skip
    asked = {name: msgspec.convert(each, Bins) for name, each in task["distributions"].items()}
    assert asked == {"accuracy": Bins(low=0.0, high=1.0), "loss": own}
    assert task["min_contributors"] == 10
    rng = np.random.default_rng(5)
    losses, hits = rng.lognormal(-0.5, 0.6, 10), rng.beta(6, 2, 10)
    # The largest is beyond the bins, so the error of what depends on it is not known.
    losses[3] = 6.0
    examples = rng.integers(1, 300, 10)
    arrays = [
        metric_arrays({"loss": a, "accuracy": b}, RANGES, int(n), 200, asked)
        for a, b, n in zip(losses, hits, examples, strict=True)
    ]
    take_part(world, world.add_devices(11), [*arrays, metric_arrays({}, RANGES, 0, 200, asked)])
    [shown] = world.rounds(task["task_id"])
    assert (shown["result"]["devices"], shown["result"]["contributors"]) == (11, 10)
    for name, values in (("loss", losses), ("accuracy", hits)):
        found = shown["result"]["distributions"][name]
        assert found["devices"] == 10
        assert found["counts"][1:-1] == np.histogram(values, found["edges"])[0].tolist()
        assert found["counts"][-1] == (1 if name == "loss" else 0)
        for tenth, decile in enumerate(found["deciles"], 1):
            if tenth < 9 or name == "accuracy":  # decile 9 of 10 values depends on the last one
                assert abs(decile["value"] - np.quantile(values, tenth / 10)) <= decile["error"] + 1e-9
        if name == "loss":
            assert found["mean"]["error"] is None
            # One device is the worst tenth: beyond the bins, so it counts as their end.
            assert found["worst"] == {"value": 4.0, "error": None}
        else:
            assert abs(found["mean"]["value"] - values.mean()) <= found["mean"]["error"] == pytest.approx(0.025)
            assert abs(found["worst"]["value"] - values.min()) <= found["worst"]["error"]
    status, answer = world.operator("GET", f"/v1/tasks/{task['task_id']}/metrics")
    assert status == 200
    [point] = answer["items"]
    assert point["distributions"] == {f"evaluation {name}": shown["result"]["distributions"][name] for name in RANGES}


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=4)
def test_an_analysis_is_the_sum_and_what_the_bundle_says_of_it(world: World, privacy: str) -> None:
    task = world.create_task(kind="analytics", privacy=privacy, cohort=3, threshold=None)
    devices = world.add_devices(3)
    histograms = [[1, 4, 0, 0], [0, 2, 2, 0], [0, 0, 6, 1]]
    take_part(
        world,
        devices,
        [
            {"light/sum": 10.0 * (index + 1), "light/count": 5.0, "hours/histogram": histogram}
            for index, histogram in enumerate(histograms)
        ],
    )
    [shown] = world.rounds(task["task_id"])
    result = shown["result"]
    assert result["values"]["hours/histogram"] == [1, 6, 8, 1]
    assert result["statistics"]["light"]["value"] == 4.0  # 60 / 15
    hours = result["statistics"]["hours"]
    assert hours["counts"] == [1, 6, 8, 1]
    # 16 counted: a quarter is 4 = 1 below + 3 of the 6 from 0 to 10; half is 8 = 7 + 1 of the 8 from 10 to 20.
    assert hours["quantiles"] == {"0.25": pytest.approx(5.0), "0.5": pytest.approx(11.25), "1.0": 20.0}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # 3 of 4 say yes: (3 - 4 / 4) / (1 / 2) = 4, with an error of sqrt(4 * 3/16) / (1/2) = sqrt(3).
        ((True, True, True, False), {"decided": 4, "taken": 4.0, "standard_error": pytest.approx(3**0.5)}),
        ((True, True, False, None), {"decided": 3, "taken": 2.5, "standard_error": pytest.approx(1.5)}),
        ((False, False, False, None), {"decided": 3, "taken": 0.0, "standard_error": pytest.approx(1.5)}),
        # Two devices decided, three are the least of a sum.
        ((True, True, None, None), None),
    ],
)
@pytest.mark.sampled(every=6)
def test_adoption_is_estimated_from_noisy_answers(
    world: World, answers: tuple[bool | None, ...], expected: dict[str, object] | None
) -> None:
    task = world.create_task(
        kind="evaluation", metrics={"loss": 8.0}, cohort=4, threshold=None, count_adoption=True, min_contributors=3
    )
    assert task["count_adoption"] is True
    evaluated = metric_arrays({"loss": 1.0}, {"loss": 8.0}, 10, 1000)
    take_part(world, world.add_devices(4), [{**evaluated, **adoption(each)} for each in answers])
    [shown] = world.rounds(task["task_id"])
    assert shown["result"]["adoption"] == expected
    assert set(shown["result"]["metrics"]) == {"loss"}


def test_the_estimate_of_adoption_is_right_on_average() -> None:
    """Against the noise itself: 300 devices, of which 90 took the version."""
    rng, decided, taken = np.random.default_rng(7), 300, 90
    truth = np.arange(decided) < taken
    answers = [np.where(rng.random(decided) < 0.75, truth, ~truth).sum() for _ in range(2000)]
    estimates = [estimate_adoption(decided, int(yes)) for yes in answers]
    error = estimates[0].standard_error
    assert np.mean([each.taken for each in estimates]) == pytest.approx(taken, abs=5 * error / 2000**0.5)
    assert np.std([each.taken for each in estimates]) == pytest.approx(error, rel=0.1)


def test_quantiles_are_those_of_numpy_where_the_bins_are_fine() -> None:
    values = np.random.default_rng(3).gamma(2.0, 3.0, 50_000)
    edges = np.linspace(0, 40, 401)
    counts = np.concatenate([[(values < 0).sum()], np.histogram(values, edges)[0], [(values >= 40).sum()]])
    for share in (0.01, 0.25, 0.5, 0.9, 0.99):
        assert quantile(counts.astype(float), list(edges), share) == pytest.approx(np.quantile(values, share), abs=0.1)


def test_a_device_without_a_number_takes_no_part() -> None:
    from archipel.errors import ProtocolError

    with pytest.raises(ProtocolError, match="loss"):
        metric_arrays({"loss": float("nan")}, {"loss": 1.0}, 5, 10)
    with pytest.raises(ProtocolError, match="loss"):
        metric_arrays({}, {"loss": 1.0}, 5, 10)
    assert float(metric_arrays({}, {"loss": 1.0}, 0, 10)[EXAMPLES]) == 0.0
    assert float(metric_arrays({"loss": 99.0}, {"loss": 1.0}, 10, 10)["loss"]) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "evaluation"}, "at least one"),
        ({"kind": "evaluation", "metrics": {"f1": 1.0}}, "f1"),
        ({"kind": "training", "metrics": {"loss": 1.0}}, "metrics: belongs to tasks of kind evaluation"),
        (
            {"kind": "training", "distributions": {"loss": "default"}},
            "distributions: belongs to tasks of kind evaluation",
        ),
        (
            {"kind": "evaluation", "metrics": RANGES, "distributions": {"f1": "default"}},
            "'f1' is not among the metrics",
        ),
        (
            {"kind": "evaluation", "metrics": RANGES, "distributions": {"loss": "default"}, "min_contributors": 9},
            "counts in bins are told of at least 10 devices",
        ),
        ({"kind": "training", "program": "look"}, "program: belongs to tasks of kind analytics"),
        ({"kind": "training", "weights": "0" * 64}, "no weights"),
        ({"kind": "analytics", "program": "train"}, "no program 'train'"),
        ({"kind": "analytics", "mode": "asynchronous"}, "makes no versions"),
        ({"mode": "asynchronous", "goal": 4}, "goal"),
        ({"mode": "asynchronous", "concurrency": 4}, "concurrency"),
        ({"privacy": "secure", "min_cohort": 1, "cohort": 1, "threshold": None}, "min_cohort"),
    ],
)
@pytest.mark.sampled(every=6)
def test_what_cannot_be_is_refused_when_the_task_is_made(world: World, settings: dict[str, Any], words: str) -> None:
    values = {
        "name": "digits", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3,
        "bundle": world.publish(), **settings,
    }  # fmt: skip
    status, answer = world.operator("POST", "/v1/tasks", values)
    assert (status, words in answer["detail"]) == (422, True), answer


@pytest.mark.sampled(every=3)
def test_a_version_can_be_evaluated(world: World) -> None:
    from tests.server.rounds.test_plain_rounds import update

    trained = world.create_task(privacy="plain", threshold=None, cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    for index, device in enumerate(devices):
        device.updating(**update(index))
    world.settle()
    weights = world.task(trained["task_id"])["model"]
    world.clock.now += 1
    task = world.create_task(
        kind="evaluation", metrics=RANGES, weights=weights, privacy="plain", threshold=None, cohort=3
    )
    take_part(world, devices, [metric_arrays({"loss": 1.0, "accuracy": 0.5}, RANGES, 10, 1000)] * 3)
    assert devices[0].plan.weights == weights
    assert world.rounds(task["task_id"])[0]["result"]["metrics"]["accuracy"] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.sampled(every=4)
def test_two_tasks_can_take_the_same_devices(world: World) -> None:
    first = world.create_task(kind="evaluation", metrics=RANGES, privacy="plain", threshold=None, cohort=3)
    devices = world.add_devices(3)
    found = [metric_arrays({"loss": 1.0, "accuracy": 0.5}, RANGES, 10, 1000)] * 3
    take_part(world, devices, found)
    [before] = world.rounds(first["task_id"])
    settings = {"kind": "evaluation", "metrics": RANGES, "privacy": "plain", "threshold": None, "cohort": 3}
    second = world.create_task(**settings, devices_of=before["round_id"])
    assert second["devices_of"] == before["round_id"]
    others = world.add_devices(4)
    for device in others:
        assert not device.join()
    world.settle()
    assert not any(device.join() for device in others)  # though they are enough
    assert world.task(second["task_id"])["waiting"] == 0
    take_part(world, devices, found)
    assert world.rounds(second["task_id"])[0]["survivors"] == before["survivors"]


@pytest.mark.sampled(every=3)
def test_devices_of_names_a_committed_round_of_the_population(world: World) -> None:
    live = world.create_task(cohort=3)
    world.start_round(world.add_devices(3))
    [current] = world.rounds(live["task_id"])
    asked = {
        "name": "again", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 3, "bundle": live["bundle"],
    }  # fmt: skip
    for round_id, changes, words in (
        ("0" * 32, {}, "no round 00000000000000000000000000000000 in population 'pupils'"),
        (current["round_id"], {"population": "others"}, "in population 'others'"),
        (current["round_id"], {}, "is advertising, not committed"),
    ):
        status, answer = world.operator("POST", "/v1/tasks", {**asked, **changes, "devices_of": round_id})
        assert (status, words in answer["detail"]) == (422, True), answer
