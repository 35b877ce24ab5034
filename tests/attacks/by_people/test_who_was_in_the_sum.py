"""Somebody who reads all that is released, and knows what every other device sent, cannot tell what one device sent.

The attacker knows the sum with the device's update and the sum with zeros in its place, and must say which of the two
was released. Without noise that is a comparison. With noise z times what one device can change, no test can have a rate
of true positives above that of false ones by more than 2 Phi(1 / (2 z)) - 1 (Dong, Roth and Su 2022, "Gaussian
differential privacy", corollary 2.13, for noise that is Gaussian but for its grid).
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from statistics import NormalDist

import msgspec
import numpy as np
import pytest

from archipel.bundle.roles import Update
from archipel.privacy import Gaussian, spent_epsilon
from archipel.privacy.central import draw_noise, events_of, release_sum
from archipel.privacy.queries import add_noise, deviations
from archipel.protocol.messages import WeightsStatement
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.sealed import Sealed
from archipel.protocol.vector import DecodedSum, Layout
from archipel.server.database.tables import WeightsEntry
from archipel.server.rounds.weights_log import sum_digest
from tests.server.rounds.noisy import central, equal_weights, model_of, run_round
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World

TRIALS, SIZE, COHORT, BITS = 4000, 4, 40, 12


def layout() -> Layout:
    port = Update(
        name="w.update", tensor="w", dtype="float32", shape=(SIZE,), kind="delta", weighting="uniform", range=1.0,
        bits=BITS, clip=1.0,
    )  # fmt: skip
    return Layout((port,))


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("multiplier", [0.5, 2.0])
def test_the_best_test_is_no_better_than_the_noise_allows(multiplier: float) -> None:
    of, modulus = layout(), 20
    settings = DifferentialPrivacy(mechanism="central", noise_multiplier=multiplier)
    # The longest update that its runtime lets through, all in one direction: the easiest to see.
    victim = of.encode({"w.update": np.full(SIZE, 1 / math.sqrt(SIZE), np.float32)}, modulus_bits=modulus, max_cohort=2)
    others, generator = np.zeros(SIZE, np.uint32), Random(5)  # the same numbers in each run of the test

    def seen(total: np.ndarray) -> float:
        noise = draw_noise(settings, of, randomness=generator.randbytes)
        found = release_sum(total, of, cohort=COHORT, modulus_bits=modulus, noise=noise)
        return float(found.deltas["w"] @ victim.astype(np.float64))

    present = np.array([seen((others + victim) & np.uint32(2**modulus - 1)) for _ in range(TRIALS)])
    absent = np.array([seen(others) for _ in range(TRIALS)])
    # The likelihood ratio's test at its best threshold, half-way between the two means.
    half = float(victim.astype(np.float64) @ victim) * (1.0 / (2 ** (BITS - 1) - 1)) / 2
    advantage = (present > half).mean() - (absent > half).mean()
    allowed = 2 * NormalDist().cdf(1 / (2 * multiplier)) - 1
    assert advantage < allowed + 4 * math.sqrt(0.5 / TRIALS)
    # The attack is a good one: with half of the noise it would break the bound.
    assert advantage > 2 * NormalDist().cdf(1 / (2 * multiplier) * 0.8) - 1 - 4 * math.sqrt(0.5 / TRIALS)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("multiplier", [0.5, 2.0])
def test_the_best_test_of_an_evaluation_is_no_better_than_the_noise_allows(multiplier: float) -> None:
    """The victim's entries are all as large as its runtime lets through: a mean, a weight, a count, and its bin of a
    histogram. The attacker weighs each entry by what the noise on it is."""
    count = {"dtype": "float32", "kind": "value", "weighting": "uniform", "range": 1.0, "bits": 2}
    mean = {"dtype": "float32", "weighting": "examples", "range": 1.0, "bits": BITS, "shape": ()}
    of = Layout(
        (
            Update(name="accuracy", tensor="accuracy", kind="value", **mean),
            Update(name="examples", tensor="examples", kind="weight", **mean),
            Update(name="devices", tensor="devices", shape=(), **count),
            Update(name="bins", tensor="bins", shape=(5,), **count),
        ),
        histograms=frozenset({("bins", "devices")}),
    )
    # Others are half of the cohort, so that no count is at an end of its range.
    others = {"accuracy": 0.0, "devices": COHORT / 2, "bins": np.array([0, 0, COHORT / 2, 0, 0])}
    victim = {"accuracy": 1.0, "devices": 1.0, "bins": np.array([0, 0, 1.0, 0, 0])}
    generator, sizes, cohort = Random(7), deviations(of, multiplier), 10**6
    steps = {"accuracy": 1 / (2 ** (BITS - 1) - 1), "examples": 1 / (2 ** (BITS - 1) - 1), "devices": 1.0, "bins": 1.0}

    def seen(present: bool) -> float:
        total = {name: others[name] + (victim[name] if present else 0.0) for name in victim}
        values = {name: np.asarray(each, np.float64) for name, each in total.items()}
        found = add_noise(
            DecodedSum({}, values, COHORT / 2 + present), of, cohort=cohort, multiplier=multiplier,
            randomness=generator.randbytes,
        )  # fmt: skip
        score = sum(
            float(np.sum(found.values[name] * victim[name])) / (sizes[name] * steps[name]) ** 2 for name in victim
        )
        return score + (found.weight or 0.0) / (sizes["examples"] * steps["examples"]) ** 2

    present = np.array([seen(True) for _ in range(TRIALS // 2)])
    absent = np.array([seen(False) for _ in range(TRIALS // 2)])
    half = (present.mean() + absent.mean()) / 2
    advantage = (present > half).mean() - (absent > half).mean()
    allowed = 2 * NormalDist().cdf(1 / (2 * multiplier)) - 1
    assert advantage < allowed + 4 * math.sqrt(1 / TRIALS)
    # The attack is a good one, where clamped counts and rounded noise take little away.
    assert advantage > 2 * NormalDist().cdf(1 / (2 * multiplier) * 0.7) - 1 - 4 * math.sqrt(1 / TRIALS)


@pytest.mark.sampled(every=8)
def test_all_rounds_together_tell_no_more_than_correlated_noise_allows() -> None:
    """A device comes to the rounds 0 and 3 of five, each time with the longest update. The attacker reads all sums, and
    undoes the correlation: the best test there is for what C x + z shows."""
    of, modulus, coefficients, multiplier, rounds, trials = layout(), 20, (4, 3, 2), 1.5, 5, 600
    settings = DifferentialPrivacy(
        mechanism="correlated", noise_multiplier=multiplier, separation=3, coefficients=coefficients
    )
    victim = of.encode({"w.update": np.full(SIZE, 1 / math.sqrt(SIZE), np.float32)}, modulus_bits=modulus, max_cohort=2)
    signed, generator = victim.astype(np.float64), Random(6)
    matrix = np.asarray(sum(c * np.eye(rounds, k=-lag) for lag, c in enumerate(coefficients)))
    present_in = np.array([1.0, 0, 0, 1, 0])
    shift = np.outer(matrix @ present_in, signed)

    def seen(present: bool) -> float:
        past: list[np.ndarray] = []
        released = np.zeros((rounds, SIZE))
        for number in range(rounds):
            noise = draw_noise(settings, of, past, generator.randbytes)
            past.insert(0, noise)
            total = victim if present and present_in[number] else np.zeros(SIZE, np.uint32)
            found = release_sum(total, of, cohort=COHORT, modulus_bits=modulus, noise=noise)
            released[number] = found.deltas["w"].reshape(-1) * (2 ** (BITS - 1) - 1)
        return float(((matrix @ released) * shift).sum())

    half = float((shift**2).sum()) / 2
    advantage = np.mean([seen(True) > half for _ in range(trials)]) - np.mean(
        [seen(False) > half for _ in range(trials)]
    )
    # A device that comes every third round changes each coefficient's row once, and a second time in the last two.
    squares = ((4 * 4 + 3 * 3 + 2 * 2) + (4 * 4 + 3 * 3)) / 16
    allowed = 2 * NormalDist().cdf(math.sqrt(squares) / (2 * multiplier)) - 1
    [event] = [Gaussian(noise_multiplier=multiplier / math.sqrt(squares))]
    assert spent_epsilon(events_of(settings, 0, rounds), 1e-5) == pytest.approx(spent_epsilon([event], 1e-5), rel=1e-9)
    assert advantage < allowed + 4 * math.sqrt(0.5 / trials)
    # The attack is a good one: it tells much more than a single round, and than an account of that would allow.
    alone = 2 * NormalDist().cdf(1 / (2 * multiplier)) - 1
    assert advantage > alone + 4 * math.sqrt(0.5 / trials)


@pytest.mark.sampled(every=3)
def test_nothing_else_that_is_released_has_the_exact_sum(world: World, tmp_path: Path) -> None:  # noqa: F811
    """The weights log has the digest of a sum, the round a result and a sum of weights: all of the noisy one."""
    noisy = equal_weights(world, tmp_path / "equal")
    task = noisy.create_task(differential_privacy=central(0.01), cohort=3)
    exact = run_round(noisy, noisy.add_devices(3))
    released = model_of(noisy, task["task_id"])
    assert np.abs(released * 3 * 256 - exact).max() > 1
    [shown] = noisy.rounds(task["task_id"])
    assert (shown["phase"], shown["result"], shown["weight_sum"]) == ("committed", None, None)

    def digest(steps: np.ndarray) -> str:
        arrays = steps.astype(np.float64) / 256
        return sum_digest(DecodedSum({"w": arrays[:6].reshape(3, 2), "b": arrays[6:]}, {}, None))

    with noisy.services.database.read() as session:
        entries = [msgspec.json.decode(row.statement, type=Sealed).body for row in session.query(WeightsEntry)]
    sums = {msgspec.json.decode(body, type=WeightsStatement).sum for body in entries}
    assert digest(exact) not in sums
    assert digest(np.rint(released * 3 * 256)) in sums


@pytest.mark.sampled(every=4)
def test_asking_again_costs_again(world: World, tmp_path: Path) -> None:  # noqa: F811
    """Whoever trains the same model twice could average the noise away: the account refuses it, whatever the task."""
    noisy = equal_weights(world, tmp_path / "equal")
    once, twice = (spent_epsilon([Gaussian(noise_multiplier=3.0)] * count, 1e-5) for count in (1, 2))
    settings = central(3.0, epsilon=(once + twice) / 2)
    noisy.create_task(differential_privacy=settings, cohort=3)
    run_round(noisy, noisy.add_devices(3))
    for change in ({"name": "again"}, {"name": "other", "hyperparameters": {"lr": 0.3}}):
        body = {
            "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 3, "bundle": noisy.publish(),
            "differential_privacy": settings, **change,
        }  # fmt: skip
        status, answer = noisy.operator("POST", "/v1/tasks", body)
        assert status == 422
        assert f"another round would make it {twice:.4g}" in str(answer)
