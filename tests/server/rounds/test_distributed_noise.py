"""Rounds whose devices add the noise, over the API: the model, the account, the budget, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.bundle import decode_manifest, open_bundle
from archipel.privacy import Gaussian, spent_epsilon
from archipel.protocol.uploads import plan_layout
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import BundleRow
from archipel.server.rounds import aggregation
from tests.server.rounds.noisy import CLIP, ENTRIES, model_of
from tests.support.devices import ANSWERED, Device
from tests.support.neighbour_devices import add_devices, policy_of
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World


@pytest.fixture
def noisy(world: World, tmp_path: Path) -> World:
    """A third of the devices may work with the server."""
    return publish(world, tmp_path)


def publish(world: World, folder: Path, weighting: str = "uniform", **policy: Any) -> World:
    folder.mkdir(exist_ok=True)
    given = {"colluders": 1 / 3, **policy}
    world.bundle_file = make_bundle(folder, world.keys.publisher, weighting=weighting, min_cohort=2, policy=given)
    return world


COHORT = {"cohort": 6, "min_cohort": 4, "threshold": 5}


def distributed(multiplier: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"mechanism": "distributed", "noise_multiplier": multiplier, "delta": 1e-5, **more}


def give_changes(world: World, devices: Sequence[Device], seed: int = 7) -> np.ndarray:
    """Every device gets the vector of random changes, of about the clip's length; returns their sum, `[8]`."""
    generator, total = np.random.default_rng(seed), np.zeros(ENTRIES)
    with world.services.database.read() as session:
        manifest = decode_manifest(session.query(BundleRow).one().manifest)
    for device in devices:
        plan = device.plan
        assert plan is not None
        changes = generator.normal(size=ENTRIES)
        changes *= 0.9 * CLIP / np.linalg.norm(changes)
        arrays = {"w.update": np.float32(changes[:6].reshape(3, 2)), "b.update": np.float32(changes[6:])}
        device.layout = layout = plan_layout(plan, manifest)
        device.vector = layout.encode(arrays, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)
        total += changes
    return total


def run_round(world: World, devices: Sequence[Device], seed: int = 7) -> np.ndarray:
    """A whole round of these devices; returns the sum of their changes without noise."""
    world.start_round(devices)
    total = give_changes(world, devices, seed)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        world.settle()
    return total


def rows(world: World) -> list[Any]:
    with world.services.database.read() as session:
        return [json.loads(row.event) for row in session.query(PrivacyEvent).order_by(PrivacyEvent.number)]


def epsilon(*multipliers: float) -> float:
    return spent_epsilon([Gaussian(noise_multiplier=each) for each in multipliers], 1e-5)


def sensitivity(steps: int) -> float:
    """Kairouz, Liu and Steinke 2021, equation 2, for 8 elements of a clip of so many steps and beta = exp(-1/2)."""
    return math.sqrt(steps**2 + ENTRIES / 4 + math.sqrt(2 * 0.5) * (steps + math.sqrt(ENTRIES) / 2))


@pytest.mark.sampled(every=8)
def test_the_new_model_is_the_mean_with_the_noise_of_all_devices(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=distributed(0.05), rounds=5, **COHORT)
    devices = noisy.add_devices(6)
    before, noise = np.zeros(ENTRIES), []
    for number in range(5):
        exact = run_round(noisy, devices, number)
        after = model_of(noisy, task["task_id"])
        noise.append((after - before) * 6 - exact)
        before = after
    plan = devices[0].plan
    assert plan is not None
    assert plan.noise is not None
    # Five of six devices have to be there to unmask, and two may work with the server: three are left.
    assert (plan.colluders, plan.threshold, plan.max_cohort) == (2, 5, 6)
    norm = sensitivity(plan.noise.steps)
    assert plan.noise.deviation == pytest.approx(0.05 * norm / math.sqrt(3), abs=1)
    # All six add noise, and rounding by chance adds less than a quarter of a step's variance.
    step = CLIP / plan.noise.steps
    expected = step * math.sqrt(6 * (plan.noise.deviation**2 + 0.25))
    found = np.concatenate(noise)
    assert found.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * found.size))
    assert abs(found.mean()) < 5 * expected / math.sqrt(found.size)
    assert noisy.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=3)
def test_a_round_costs_what_the_noise_of_its_devices_makes_of_it(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=distributed(1.0), rounds=2, **COHORT)
    devices = noisy.add_devices(6)
    run_round(noisy, devices)
    plan = devices[0].plan
    assert plan is not None
    assert plan.noise is not None
    [[event]] = rows(noisy)
    # Six devices less two that may collude.
    expected = math.sqrt(4) * plan.noise.deviation / sensitivity(plan.noise.steps)
    assert event["type"] == "gaussian"
    assert event["noise_multiplier"] == pytest.approx(expected, rel=1e-3)
    assert expected == pytest.approx(math.sqrt(4 / 3), rel=0.01)
    spent = noisy.task(task["task_id"])["privacy_spent"]
    assert spent["epsilon"] == pytest.approx(epsilon(event["noise_multiplier"]), rel=1e-12)
    assert "nobody sees a sum without noise" in spent["trust"]


@pytest.mark.sampled(every=3)
def test_a_device_that_leaves_makes_the_round_dearer(noisy: World) -> None:
    """Five of six: the noise of three is left besides that of two, as planned."""
    task = noisy.create_task(differential_privacy=distributed(1.0), **COHORT)
    devices = noisy.add_devices(6)
    noisy.start_round(devices)
    give_changes(noisy, devices)
    for phase in ANSWERED:
        for device in devices if phase in ANSWERED[:3] else devices[1:]:
            device.answer(phase)
        if phase == "masking":
            noisy.clock.now += task["deadlines"]["masking"] + 1
        noisy.settle()
    assert noisy.task(task["task_id"])["state"] == "completed"
    [[event]] = rows(noisy)
    assert 1.0 <= event["noise_multiplier"] < 1.01


@pytest.mark.sampled(every=4)
def test_a_round_that_is_aggregated_again_is_paid_for_once(noisy: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is in what devices sent, so looking at it again tells nothing new."""
    task = noisy.create_task(differential_privacy=distributed(1.0), **COHORT)
    devices = noisy.add_devices(6)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(aggregation, "_make", die)
        with pytest.raises(KeyboardInterrupt):
            run_round(noisy, devices)
    assert len(rows(noisy)) == 1
    noisy.restart_coordinator()
    noisy.settle()
    assert [row["phase"] for row in noisy.rounds(task["task_id"])] == ["committed"]
    assert len(rows(noisy)) == 1


@pytest.mark.sampled(every=4)
def test_a_target_is_planned_with_the_fewest_devices(noisy: World, tmp_path: Path) -> None:
    wanted = {"mechanism": "distributed", "epsilon": 8.0, "delta": 1e-5}
    task = noisy.create_task(differential_privacy=wanted, rounds=2, **COHORT)
    multiplier = task["differential_privacy"]["noise_multiplier"]
    assert epsilon(multiplier, multiplier) <= 8.0 < epsilon(multiplier * 0.9999, multiplier * 0.9999)
    devices = noisy.add_devices(6)
    run_round(noisy, devices)
    run_round(noisy, devices)
    spent = noisy.task(task["task_id"])["privacy_spent"]["epsilon"]
    # Four devices' noise besides the colluders', and three's was planned.
    assert spent == pytest.approx(epsilon(*[multiplier * math.sqrt(4 / 3)] * 2), rel=0.05)
    # A policy that asks for more noise than the target needs gets it.
    publish(noisy, tmp_path / "more", noise_multiplier=30.0)
    more = noisy.create_task(differential_privacy=wanted, rounds=2, **COHORT)
    assert more["differential_privacy"]["noise_multiplier"] == 30.0


@pytest.mark.sampled(every=3)
def test_a_task_ends_before_the_round_that_may_cost_too_much(noisy: World) -> None:
    """One round of six fits, and another one of the fewest would not."""
    one, worst = epsilon(2.0 * math.sqrt(4 / 3)), epsilon(2.0 * math.sqrt(4 / 3), 2.0)
    task = noisy.create_task(differential_privacy=distributed(2.0, epsilon=(one + worst) / 2), rounds=9, **COHORT)
    devices = noisy.add_devices(6)
    run_round(noisy, devices)
    noisy.settle()
    shown = noisy.task(task["task_id"])
    assert (shown["state"], shown["rounds_committed"], len(rows(noisy))) == ("completed", 1, 1)
    assert "another round would make it" in shown["reason"]


@pytest.mark.sampled(every=3)
def test_a_sum_that_no_devices_can_have_sent_fails_the_round(noisy: World) -> None:
    task = noisy.create_task(differential_privacy=distributed(1.0), rounds=2, **COHORT)
    devices = noisy.add_devices(6)
    noisy.start_round(devices)
    give_changes(noisy, devices)
    plan = devices[0].plan
    assert plan is not None
    assert devices[0].layout is not None
    [(_, bits)] = devices[0].layout.widths(6)
    devices[0].vector = (devices[0].vector + 2 ** (bits - 1) - 1) % np.uint32(2**plan.modulus_bits)
    for phase in ANSWERED:
        for device in devices:
            device.answer(phase)
        noisy.settle()
    [failed] = [row for row in noisy.rounds(task["task_id"]) if row["phase"] == "failed"]
    assert "with their noise" in failed["reason"]
    assert len(rows(noisy)) == 1


@pytest.mark.sampled(every=3)
def test_devices_that_cannot_add_noise_are_not_taken(noisy: World) -> None:
    """Such as pages in browsers: they would leave each round, which then fails."""
    task = noisy.create_task(differential_privacy=distributed(), cohort=6, min_cohort=6, threshold=5)
    devices = noisy.add_devices(6)
    devices[0].adds_noise = False
    for device in devices:
        assert device.check_in() is None
    noisy.settle()
    shown = noisy.task(task["task_id"])
    assert shown["waiting"] == 5
    assert "1 waiting device cannot add noise to updates" in shown["waiting_for"]
    devices[0].adds_noise = True
    assert devices[0].check_in() is None
    noisy.settle()
    assert all(device.join() for device in devices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": "plain"}, "set privacy to 'secure'"),
        ({"differential_privacy": {**distributed(), "mechanism": "local"}}, "take 'distributed'"),
        ({"mode": "asynchronous"}, "several times"),
        ({"secure_groups": 3, "cohort": 18}, "leave aggregation and secure_groups away"),
        ({"kind": "evaluation", "metrics": {"loss": 8.0}}, "is for trainings, whose rounds add up"),
        ({"differential_privacy": distributed(1e6)}, "take a multiplier nearer to 1"),
        ({"differential_privacy": distributed(1.0, clip_noise=2.0)}, "which only 'central' can do"),
        ({"protocol": "neighbours"}, "protocol"),
    ],
)
@pytest.mark.sampled(every=6)
def test_what_it_does_not_go_with(noisy: World, settings: dict[str, Any], message: str) -> None:
    values = {
        "name": "x", "population": "pupils", "rounds": 1, "differential_privacy": distributed(),
        "bundle": noisy.publish(), **COHORT, "threshold": None, **settings,
    }  # fmt: skip
    status, answer = noisy.operator("POST", "/v1/tasks", values)
    assert status in (400, 422)
    assert message in str(answer), answer


def test_devices_that_weigh_by_their_examples_are_refused(world: World, tmp_path: Path) -> None:
    publish(world, tmp_path, weighting="examples")
    values = {"name": "x", "population": "pupils", "rounds": 1, "bundle": world.publish(), **COHORT}
    status, answer = world.operator("POST", "/v1/tasks", {**values, "differential_privacy": distributed()})
    assert status == 422
    assert "weighting = 'uniform'" in str(answer)


def test_a_policy_that_asks_for_noise_gets_no_task_without(world: World, tmp_path: Path) -> None:
    publish(world, tmp_path, noise_multiplier=1.0)
    values = {"name": "x", "population": "pupils", "rounds": 1, "bundle": world.publish(), **COHORT}
    for noise in ({}, {"mechanism": "central", "noise_multiplier": 9.0, "delta": 1e-5}, distributed(0.999)):
        status, answer = world.operator("POST", "/v1/tasks", {**values, "differential_privacy": noise})
        assert status == 422
        assert "the policy wants" in str(answer)
    assert world.operator("POST", "/v1/tasks", {**values, "differential_privacy": distributed(1.0)})[0] == 201


@pytest.mark.sampled(every=4)
def test_over_neighbours_the_noise_is_for_the_fewest_that_hide_each_other(world: World, tmp_path: Path) -> None:
    """Devices that take the server to be malicious count on three of ten, and are charged for no more."""
    folder = tmp_path / "over"
    folder.mkdir()
    world.bundle_file = make_bundle(
        folder, world.keys.publisher, weighting="uniform", policy={**policy_of("malicious"), "noise_multiplier": 1.0}
    )
    policy = open_bundle(world.bundle_file, world.settings.trusted_keys).manifest.privacy
    settings = {"cohort": 10, "threshold": None, "differential_privacy": distributed(1.0)}
    task = world.create_task(protocol="neighbours", **settings)
    devices = add_devices(world, 10, policy)
    exact = run_round(world, devices)
    plan = devices[0].plan
    assert plan is not None
    assert plan.noise is not None
    assert (plan.protocol, policy.min_cohort) == ("neighbours", 3)
    norm = sensitivity(plan.noise.steps)
    assert plan.noise.deviation == pytest.approx(norm / math.sqrt(3), abs=1)
    [[event]] = rows(world)
    assert event["noise_multiplier"] == pytest.approx(math.sqrt(3) * plan.noise.deviation / norm, rel=1e-3)
    found = model_of(world, task["task_id"]) * 10 - exact
    deviation = CLIP / plan.noise.steps * plan.noise.deviation * math.sqrt(10)
    assert 0.1 * deviation < found.std() < 3 * deviation
    # Where nobody asks for a protocol it is the complete graph, over which all ten are counted.
    assert world.create_task(**settings)["protocol"] == "complete"
