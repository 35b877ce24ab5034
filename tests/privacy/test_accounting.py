"""Epsilons against published ones, and against the definitions, integrated here."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from archipel.errors import PolicyError
from archipel.privacy import Event, Gaussian, Poisson, Repeated, spent_epsilon
from archipel.privacy.accounting import AccountantName

# The orders over which Abadi et al. and the libraries below take the least bound, and some more.
ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024], float)


def repeated(multiplier: float, count: int, probability: float = 1.0) -> Event:
    noise = Gaussian(noise_multiplier=multiplier)
    return Repeated(event=noise if probability == 1 else Poisson(probability=probability, event=noise), count=count)


def renyi(order: float, multiplier: float, probability: float) -> float:
    """D_order(mixture || N(0, s^2)) by the trapezoidal rule, which converges exponentially for such integrands.

    Mironov, Talwar, Zhang 2019, "Renyi differential privacy of the sampled Gaussian mechanism", theorems 4 and 5: this
    direction is the larger one.
    """
    at = np.arange(-15 * multiplier, order + 15 * multiplier, multiplier / 25)
    density = -(at**2) / (2 * multiplier**2) - math.log(multiplier * math.sqrt(2 * math.pi))
    with np.errstate(divide="ignore"):
        stays = np.log(1 - probability) if probability < 1 else -np.inf
    ratio = np.logaddexp(stays, math.log(probability) + (2 * at - 1) / (2 * multiplier**2))
    exponent = density + order * ratio
    top = exponent.max()
    return (top + math.log(np.exp(exponent - top).sum() * (at[1] - at[0]))) / (order - 1)


def costs_of(multiplier: float, probability: float) -> np.ndarray:
    return np.array([renyi(order, multiplier, probability) for order in ORDERS])


def check(found: float, exact: float, whole: float) -> None:
    """dp-accounting computes whole orders exactly, and bounds sampled noise of orders between them from above."""
    assert exact - 1e-9 <= found <= whole + 1e-6
    assert found < 1.0005 * exact
    if exact == whole:
        assert found == pytest.approx(exact, abs=1e-6)


def whole_orders(costs: np.ndarray) -> np.ndarray:
    return np.where(np.rint(ORDERS) == ORDERS, costs, np.inf)


def converted(costs: np.ndarray, delta: float) -> float:
    """Canonne, Kamath, Steinke 2020, proposition 12; never below 0."""
    bounds = costs + (-math.log(delta) - np.log(ORDERS)) / (ORDERS - 1) + np.log1p(-1 / ORDERS)
    return max(0.0, float(bounds.min()))


# Sampling probability, noise multiplier, steps, delta. Then what was printed; "=": of the same formulas, so it is what
# comes out here; "<": of the older conversion from Renyi to epsilon, so it is above, by no more than the two differ.
SAMPLED: dict[str, tuple[float, float, int, float, str, float]] = {
    "TF Privacy, compute_dp_sgd_privacy_test, Test0": (150 / 60000, 1.3, 6000, 1e-5, "=", 0.7242234026109595),
    "TF Privacy, compute_dp_sgd_privacy_test, Test1": (1e-3, 1.0, 30_000, 1e-7, "=", 1.4154988495444845),
    "Opacus, accountants_test, rdp": (0.04, 1.5, 2250, 1e-5, "=", 7.32911117143),
    "Abadi et al. 2016, section 3.2": (0.01, 4.0, 10_000, 1e-5, "<", 1.26),
    "TF Privacy, tutorials, first row": (256 / 60000, 1.3, 15 * 234, 1e-5, "<", 1.19),
    "TF Privacy, tutorials, second row": (256 / 60000, 1.1, 60 * 234, 1e-5, "<", 3.01),
    "TF Privacy, tutorials, third row": (256 / 60000, 0.7, 45 * 234, 1e-5, "<", 7.10),
    "TF Privacy, compute_dp_sgd_privacy": (256 / 60000, 1.12, 60 * 234, 1e-5, "<", 2.92),
}
# The same by definition alone, with settings of federations: noise multiplier, steps, delta, sampling probability.
BY_DEFINITION: list[tuple[float, int, float, float]] = [
    (1.0, 1, 1e-5, 1.0),
    (2.0, 10, 1e-6, 1.0),
    (5.0, 100, 1e-5, 1.0),
    (10.0, 400, 1e-6, 1.0),
    (30.0, 1000, 1e-8, 1.0),
    (0.8, 200, 1e-5, 0.01),
    (1.0, 2000, 1e-9, 0.005),
    (3.0, 500, 1e-6, 0.2),
]


@pytest.mark.parametrize("name", SAMPLED)
def test_published_epsilons(name: str) -> None:
    probability, multiplier, steps, delta, relation, printed = SAMPLED[name]
    found = spent_epsilon([repeated(multiplier, steps, probability)], delta)
    costs = steps * costs_of(multiplier, probability)
    exact = converted(costs, delta)
    check(found, exact, converted(whole_orders(costs), delta))
    if relation == "=":
        assert exact == pytest.approx(printed, abs=1e-6)
    else:
        assert 0.8 * printed < found < printed


@pytest.mark.parametrize(("multiplier", "steps", "delta", "probability"), BY_DEFINITION)
def test_by_definition(multiplier: float, steps: int, delta: float, probability: float) -> None:
    found = spent_epsilon([repeated(multiplier, steps, probability)], delta)
    costs = costs_of(multiplier, probability)
    if probability == 1:
        # Mironov 2017, "Renyi differential privacy", proposition 7.
        np.testing.assert_allclose(costs, ORDERS / (2 * multiplier**2), rtol=1e-9)
        assert found == pytest.approx(converted(steps * costs, delta), abs=1e-6)
    check(found, converted(steps * costs, delta), converted(whole_orders(steps * costs), delta))


def exact_epsilon(multiplier: float, steps: int, delta: float) -> float:
    """Balle and Wang 2018, "Improving the Gaussian mechanism for differential privacy", theorem 8, for the sum of
    `steps` sums, which is one Gaussian mechanism with a noise multiplier `steps`**0.5 times smaller."""
    sigma, normal = multiplier / math.sqrt(steps), NormalDist()

    def delta_of(epsilon: float) -> float:
        return normal.cdf(1 / (2 * sigma) - epsilon * sigma) - math.exp(epsilon) * normal.cdf(
            -1 / (2 * sigma) - epsilon * sigma
        )

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(
    ("multiplier", "steps", "delta"), [(1.0, 1, 1e-5), (4.0, 1, 1e-6), (10.0, 100, 1e-5), (20.0, 50, 1e-6)]
)
@pytest.mark.sampled(every=6)
def test_the_analytic_gaussian_mechanism(multiplier: float, steps: int, delta: float) -> None:
    exact = exact_epsilon(multiplier, steps, delta)
    found = spent_epsilon([repeated(multiplier, steps)], delta, "pld")
    # It rounds pessimistically, to a grid: never below, and not by much above.
    assert exact - 1e-9 <= found < exact + 1e-3
    assert exact < spent_epsilon([repeated(multiplier, steps)], delta)


def test_epsilon_of_one_released_sum_as_printed_by_balle_and_wang() -> None:
    # With the classical sigma = sqrt(2 log(1.25 / delta)) / epsilon the mechanism has room to spare (their section 2).
    sigma = math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5
    assert spent_epsilon([Gaussian(noise_multiplier=sigma)], 1e-5, "pld") < 0.5


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.sampled(every=8)
def test_tasks_add_up(accountant: AccountantName) -> None:
    first, second = repeated(6.0, 30), repeated(9.0, 80)
    together = spent_epsilon([first, second, first], 1e-6, accountant)
    # n releases with multiplier z cost n / z^2 together, whatever the order: one release of that cost.
    joint = 1 / math.sqrt(60 / 36 + 80 / 81)
    assert together == pytest.approx(spent_epsilon([Gaussian(noise_multiplier=joint)], 1e-6, accountant), abs=2e-3)
    assert together == pytest.approx(spent_epsilon([second, first, first], 1e-6, accountant), rel=1e-9)
    assert spent_epsilon([first], 1e-6, accountant) < together
    alone = spent_epsilon([first], 1e-6, accountant) * 2 + spent_epsilon([second], 1e-6, accountant)
    assert together < alone


def test_nothing_costs_nothing() -> None:
    assert spent_epsilon([], 1e-6) == 0.0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_delta_has_bounds(delta: float) -> None:
    with pytest.raises(PolicyError, match="delta"):
        spent_epsilon([Gaussian(noise_multiplier=1.0)], delta)


def test_an_unknown_accountant() -> None:
    with pytest.raises(PolicyError, match="there are: rdp, pld"):
        spent_epsilon([Gaussian(noise_multiplier=1.0)], 1e-5, "moments")  # type: ignore[arg-type]
