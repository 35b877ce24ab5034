"""The audit's statistics against other sources, the canaries against a mechanism that breaks its bound, a quick run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER / "privacy")
    import bounds

    return bounds


@pytest.fixture
def membership(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER / "privacy")
    import membership

    return membership


@pytest.mark.sampled(every=4)
def test_the_area_is_that_of_scikit_learn(bounds: ModuleType) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    members = rng.random(300) < 0.4
    for scores in (rng.standard_normal(300) + members, rng.integers(0, 4, 300) + members, np.zeros(300)):
        assert bounds.area(scores, members) == pytest.approx(metrics.roc_auc_score(members, scores))


@pytest.mark.sampled(every=3)
def test_few_false_positives_are_counted_by_hand(bounds: ModuleType) -> None:
    scores = np.array([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0])
    members = np.array([True, False, True, True, False, True, False, False])
    assert bounds.true_positives(scores, members, 0.0) == 1 / 4
    assert bounds.true_positives(scores, members, 0.25) == 3 / 4


@pytest.mark.parametrize(("right", "guesses"), [(60, 60), (180, 200), (55, 100), (51, 100)])
def test_without_delta_the_bound_is_that_of_clopper_and_pearson(bounds: ModuleType, right: int, guesses: int) -> None:
    """Right guesses are then at most as likely as e^epsilon / (e^epsilon + 1) each."""
    stats = pytest.importorskip("scipy.stats")
    interval = stats.binomtest(right, guesses).proportion_ci(confidence_level=0.9, method="exact")
    expected = max(0.0, math.log(interval.low / (1 - interval.low)))
    assert bounds.epsilon_of_guesses(right, guesses, 1000, 0.0) == pytest.approx(expected, abs=1e-6)


def test_delta_counts_as_the_theorem_says(bounds: ModuleType) -> None:
    """Theorem 5.2 with sums of binomial coefficients: at the bound, so many right guesses have probability 5%."""
    right, guesses, canaries, delta = 45, 50, 400, 1e-4
    found = bounds.epsilon_of_guesses(right, guesses, canaries, delta)
    share = math.exp(found) / (1 + math.exp(found))
    masses = [math.comb(guesses, k) * share**k * (1 - share) ** (guesses - k) for k in range(guesses + 1)]
    slack = max(math.fsum(masses[right - i : right]) / i for i in range(1, right + 1))
    assert math.fsum(masses[right:]) + 2 * canaries * delta * slack == pytest.approx(0.05, abs=1e-6)
    assert found < bounds.epsilon_of_guesses(right, guesses, canaries, 0.0)


@pytest.mark.sampled(every=8)
def test_the_bound_holds_for_randomised_response(bounds: ModuleType) -> None:
    """A mechanism that tells each bit truly with probability e^2 / (e^2 + 1) has an epsilon of 2, and no less."""
    rng, truthful = np.random.default_rng(1), math.exp(2) / (1 + math.exp(2))
    found = [bounds.epsilon_of_guesses(int(rng.binomial(800, truthful)), 800, 800, 0.0) for _ in range(400)]
    # Of 400 bounds with confidence 95% 20 are above; 40 have a probability below 1e-4.
    assert sum(each > 2 for each in found) < 40
    assert np.median(found) > 1.7


@pytest.mark.sampled(every=4)
def test_the_estimate_is_that_of_the_accountant(bounds: ModuleType) -> None:
    """Of Gaussian noise, whose exact epsilon dp-accounting has by privacy loss distributions."""
    pytest.importorskip("dp_accounting")
    from archipel.privacy import Gaussian, spent_epsilon

    grid = np.array([-1.0, 1.0])
    for multiplier in (0.7, 2.0):
        # Two points with the variance of the noise over the sensitivity, so the means are 1 / multiplier apart.
        others = np.repeat(grid, 50) * math.sqrt(198 / 200)
        found = bounds.epsilon_of_normal(others + 1 / multiplier, others, 1e-5)
        exact = spent_epsilon([Gaussian(noise_multiplier=multiplier)], 1e-5, "pld")
        assert found == pytest.approx(exact, rel=2e-3)


@pytest.mark.sampled(every=4)
def test_the_likelihood_ratio_is_that_of_densities(membership: ModuleType) -> None:
    """Two devices, one digit: by hand, with the densities of SciPy."""
    stats = pytest.importorskip("scipy.stats")
    values = np.array([[1.0, 5.0], [2.0, 4.0], [0.0, 1.0], [-1.0, 2.0], [0.5, 2.5]])[:, :, None]
    members = np.array([[1, 1], [1, 1], [0, 0], [0, 0], [1, 0]], bool)
    found = membership.likelihood_ratios(values, members)[4]
    # Means of 1, 2 (in) and 0, -1 (out), of 5, 4 and 1, 2; squares 4 x 0.25 with 4 - 2 degrees of freedom.
    deviation = math.sqrt(1.0 / 2)
    for device, (inside, outside) in enumerate([(1.5, -0.5), (4.5, 1.5)]):
        at = values[4, device, 0]
        expected = stats.norm.logpdf(at, inside, deviation) - stats.norm.logpdf(at, outside, deviation)
        assert found[device] == pytest.approx(expected)


@pytest.mark.slow
def test_canaries_find_noise_that_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bound of an account of epsilon 1 is broken by a tenth of its noise, and not by the noise itself."""
    pytest.importorskip("dp_accounting")
    monkeypatch.syspath_prepend(FOLDER / "privacy")
    import canaries
    import msgspec
    from federations import Federations, make_bundle, make_devices, noise

    federations = Federations(make_bundle(tmp_path, rate=0.3, epochs=1, digits=3), make_devices(20, digits=3))
    right, rng = noise(5, epsilon=1.0), np.random.default_rng(0)
    assert right.noise_multiplier is not None
    wrong = msgspec.structs.replace(right, noise_multiplier=right.noise_multiplier / 10, epsilon=None)
    bounds_of = [
        canaries.lower_bound([canaries.run(federations, np.arange(20), 1000, 5, privacy, rng)], 0.1)[0]
        for privacy in (right, wrong)
    ]
    assert bounds_of[0] <= 1.0 < 2.0 < bounds_of[1]


@pytest.mark.slow
def test_a_quick_run_gives_rows() -> None:
    pytest.importorskip("dp_accounting")
    command = [sys.executable, str(FOLDER / "privacy_audit.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {case.partition(",")[0] for case in rows} == {
        "membership", "canaries", "canaries without noise", "inversion",
    }  # fmt: skip
    assert rows["canaries, bound"]["ours"] <= rows["canaries, bound"]["peer"] == pytest.approx(8.0, abs=0.01)
    # Without noise every canary is found.
    assert rows["canaries without noise, right"]["ratio"] == 1.0
