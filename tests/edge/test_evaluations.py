"""Evaluations of a whole tree: the root's numbers are those of all devices, and each server knows what it may."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.operator import TaskRequest
from archipel.protocol.messages import Bins
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.operator.tasks import TaskInfo
from tests.edge.test_rounds import uplink
from tests.support.edge_world import AT_EDGE, AT_ROOT, SITES, ComputedSite, EdgeWorld, open_edge_world, squared_errors
from tests.support.linear_bundle import W0
from tests.support.tree import PATIENT

BOUND = 64.0
STEP = 1 / (2**19 - 1)
"""Of entries of 20 bits, in parts of their range."""
ASK: dict[str, Any] = {
    "kind": "evaluation", "metrics": {"mse": BOUND}, "max_examples": 20, "min_cohort": 3, "deadlines": PATIENT,
}  # fmt: skip


def mean(numbers: list[int], w: np.ndarray = W0) -> float:
    """Over all examples of these devices."""
    return float(np.concatenate([squared_errors(number, w) for number in numbers]).mean())


def ended(world: EdgeWorld, task: TaskInfo) -> TaskInfo:
    world.until(lambda: world.operator.tasks.get(task.task_id).state != "running")
    return world.operator.tasks.get(task.task_id)


@pytest.mark.sampled(every=3)
def test_the_mean_is_that_of_all_examples_and_each_server_knows_what_it_may(tmp_path: Path) -> None:
    numbers = [1, 2, 3, 4, 5, 6, 7]
    with open_edge_world(tmp_path, min_contributors=2) as world:
        devices = [world.device(number) for number in (1, 2)]
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        uplink(world)
        with world.running():
            trained = ended(world, world.task(min_cohort=3, deadlines=PATIENT))
            # The devices have the version from the root's log, which the edge hands on.
            task = world.task(**ASK, weights=trained.model)
            assert ended(world, task).state == "completed"
            world.until(lambda: world.edge_operator.tasks.get(task.task_id).rounds_committed)
            world.until(lambda: all(agent.rounds[-1].step == "closed" for agent in devices))
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        told = above.result
        assert told is not None
        assert (told.devices, told.contributors) == (7, 7)
        # Each device rounds its mean times its weight, and its weight, to a step.
        assert told.examples == pytest.approx(sum(5 + number for number in numbers), abs=7 * 20 * STEP)
        w = world.weights(trained)
        assert not np.array_equal(w, W0)
        assert told.metrics["mse"] == pytest.approx(mean(numbers, w), abs=7 * 3 * BOUND * STEP)
        # The edge knows how many of its devices are in it, and tells nothing of what they measured.
        [own] = list(world.edge_operator.tasks.rounds(task.task_id))
        assert own.result is not None
        assert (own.phase, own.result.devices, own.result.contributors) == ("committed", 2, 2)
        assert (own.result.metrics, own.result.examples, own.weight_sum) == ({}, None, None)
        for agent in devices:
            assert (agent.rounds[-1].result, agent.rounds[-1].origin) == ("took_part", above.round_id)


@pytest.mark.sampled(every=3)
def test_versions_of_a_training_are_evaluated_by_the_whole_tree(tmp_path: Path) -> None:
    numbers = [1, 2, 3, 4, 5]
    with open_edge_world(tmp_path, min_contributors=2) as world:
        for number in (1, 2):
            world.device(number)
        world.site("b", ComputedSite([3, 4, 5]))
        uplink(world)
        with world.running():
            more = {"evaluate_every": 1, "metrics": {"mse": BOUND}, "max_examples": 20}
            training = ended(world, world.task(rounds=2, cohort=2, deadlines=PATIENT, **more))
            assert training.state == "completed"
            world.until(lambda: all(each.ended for each in world.operator.tasks.list()), seconds=60)
        committed = [each for each in world.rounds(training) if each.phase == "committed"]
        curve = list(world.operator.tasks.metrics(training.task_id))
        assert [point.evaluation_state for point in curve] == ["completed", "completed"]
        for round_, point in zip(committed, curve, strict=True):
            assert round_.weights_out is not None
            assert point.evaluation is not None
            evaluation = world.operator.tasks.get(point.evaluation)
            assert (evaluation.levels, evaluation.site, evaluation.weights) == (1, training.site, round_.weights_out)
            w = np.asarray(world.operator.weights.read(round_.weights_out)["w"])
            assert point.metrics["evaluation mse"] == pytest.approx(mean(numbers, w), abs=5 * 3 * BOUND * STEP)
        assert point.metrics["evaluation mse"] < mean(numbers)
        # The edge carries out what the root asks, and no evaluations besides.
        kinds = sorted(task.kind for task in world.edge_operator.tasks.list())
        assert kinds == ["evaluation", "evaluation", "training"]


@pytest.mark.sampled(every=6)
def test_counts_in_bins_and_noise_are_those_of_a_flat_evaluation(tmp_path: Path) -> None:
    bins = Bins(low=0.0, high=60.0, count=4, better="lower")
    sites = [list(range(1, 11)), list(range(11, 22)), list(range(22, 33))]
    large = msgspec.structs.replace(SITES, min_site_cohort=10, max_site_cohort=12)
    with open_edge_world(tmp_path, min_contributors=4, aggregators=large) as world:
        for name, numbers in zip("abc", sites):
            world.site(name, ComputedSite(numbers))
        noise = DifferentialPrivacy(mechanism="central", noise_multiplier=0.001, delta=1e-5)
        # An evaluation of devices in the sites' population counts these alone: there are fewer sites than its least.
        for number in (1, 2, 3, 4):
            world.device(number, world.token("root", AT_ROOT))
        with world.running():
            ask = {**ASK, "max_examples": 40}
            flat = {**ask, "levels": 0, "cohort": 4, "min_cohort": 4, "threshold": None, "deadlines": {}}
            assert ended(world, world.task(**flat, name="flat")).state == "completed"
            spread = {**ask, "metrics": {"mse": 2000.0}, "distributions": {"mse": bins}}
            exact = ended(world, world.task(**spread, name="spread"))
            noisy = ended(world, world.task(**ask, differential_privacy=noise, name="noisy"))
        [told] = [each.result for each in world.rounds(exact) if each.phase == "committed"]
        own = np.array([squared_errors(number).mean() for numbers in sites for number in numbers])
        expected = np.histogram(own, [-np.inf, 0, 15, 30, 45, 60, np.inf])[0]
        assert told is not None
        assert told.distributions["mse"].counts == expected.tolist()
        assert told.metrics["mse"] == pytest.approx(
            mean([number for numbers in sites for number in numbers]), abs=32 * 3 * 2000 * STEP
        )
        # By hand: the mean, the clamped share, the examples and the contributors are four blocks, so each has noise of
        # 0.001 sqrt(4) of what one device can change it by.
        assert noisy.privacy_spent is not None
        assert noisy.privacy_spent.releases == 1
        [round_] = [each for each in world.rounds(noisy) if each.phase == "committed"]
        found = round_.result
        assert found is not None
        sent = [np.clip(squared_errors(number).mean(), 0, BOUND) for numbers in sites for number in numbers]
        weights = np.array([(5 + number) / 40 for numbers in sites for number in numbers])
        true = float((np.array(sent) * weights).sum() / weights.sum())
        error = math.hypot(0.002 * BOUND, found.metrics["mse"] * 0.002) / weights.sum()
        assert set(found.noise) == {"mse"}
        assert found.noise["mse"] == pytest.approx(error, rel=0.01)
        assert abs(found.metrics["mse"] - true) < 6 * error + 32 * 3 * BOUND * STEP


@pytest.mark.sampled(every=6)
def test_an_edge_that_wants_queries_approved_is_asked_first(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, approval=True, min_contributors=2) as world:
        for number in (1, 2):
            world.device(number)
        world.site("b", ComputedSite([3, 4, 5]))
        uplink(world)
        with world.running():
            task = world.task(**{**ASK, "min_cohort": 2, "cohort": 2})
            world.until(world.rows)
            own = world.edge_operator.tasks.get(task.task_id)
            assert (own.state, own.waiting_for) == (
                "proposed", "waits for the approval of somebody else who may run queries"
            )  # fmt: skip
            world.edge_operator.tasks.approve(task.task_id)
            assert ended(world, task).state == "completed"
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        assert above.result is not None
        assert above.result.contributors == 5


@pytest.mark.sampled(every=6)
def test_devices_that_were_asked_often_enough_are_not_asked_for_the_root(tmp_path: Path) -> None:
    with open_edge_world(tmp_path, min_contributors=2, queries=1) as world:
        devices = [world.device(number) for number in (1, 2)]
        world.site("b", ComputedSite([3, 4, 5]))
        world.site("c", ComputedSite([6, 7]))
        edge = uplink(world)
        bundle = world.edge_operator.bundles.upload(world.bundle_file).digest
        ask = {**ASK, "min_cohort": 2, "cohort": 2, "threshold": None, "deadlines": {}}
        own = world.edge_operator.tasks.create(
            TaskRequest(name="own", population=AT_EDGE, bundle=bundle, rounds=1, **ask)
        )
        with world.running():
            world.until(lambda: world.edge_operator.tasks.get(own.task_id).state == "completed")
            task = world.task(**{**ASK, "min_cohort": 2})
            assert ended(world, task).state == "completed"
            world.until(lambda: edge.rounds[-1].step == "closed")
        assert f"population '{AT_EDGE}' was asked 1 times in the last 30 days" in edge.rounds[-1].reason
        assert [len(agent.rounds) for agent in devices] == [1, 1]
        [above] = [each for each in world.rounds(task) if each.phase == "committed"]
        assert above.result is not None
        assert above.result.metrics["mse"] == pytest.approx(mean([3, 4, 5, 6, 7]), abs=5 * 3 * BOUND * STEP)


@pytest.mark.slow
def test_counts_in_bins_of_an_edge_s_own_devices_round_after_round(tmp_path: Path) -> None:
    bins = Bins(low=0.0, high=400.0, count=8, better="lower")
    large = msgspec.structs.replace(SITES, min_site_cohort=10, max_site_cohort=12)
    with open_edge_world(tmp_path, cohort=10, min_contributors=10, aggregators=large) as world:
        for number in range(1, 11):
            world.device(number)
        world.site("b", ComputedSite(list(range(11, 22))))
        uplink(world)
        ask = {**ASK, "metrics": {"mse": 400.0}, "distributions": {"mse": bins}, "max_examples": 40}
        with world.running():
            task = ended(world, world.task(**{**ask, "rounds": 2, "cohort": 2, "min_cohort": 2}))
        assert task.state == "completed", task.reason
        own = np.array([squared_errors(number).mean() for number in range(1, 22)])
        expected = np.histogram(own, [-np.inf, *np.linspace(0, 400, 9), np.inf])[0]
        told = [each.result for each in world.rounds(task) if each.phase == "committed"]
        # The same devices each time: others would differ by fewer than ten.
        assert len(told) == 2
        for each in told:
            assert each is not None
            assert (each.contributors, each.distributions["mse"].counts) == (21, expected.tolist())
