"""Correlated noise in whole numbers: that it is the mechanism of the account, and what that costs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from archipel.errors import PolicyError
from archipel.privacy import Gaussian, Repeated, spent_epsilon
from archipel.privacy.central import draw_noise, events_of, noise_scale, settle
from archipel.privacy.correlated import correlate, spread
from archipel.protocol.bounds import groups
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from tests.privacy.test_central import byte_source, layout

COEFFICIENTS = (8, 5, 3, 1)


def correlated(**more: Any) -> DifferentialPrivacy:
    given = {"noise_multiplier": 2.0, "separation": 4, "coefficients": COEFFICIENTS, "delta": 1e-5, **more}
    return DifferentialPrivacy(mechanism="correlated", **given)


def noise_of(fresh: np.ndarray, coefficients: tuple[int, ...] = COEFFICIENTS) -> np.ndarray:
    past: list[np.ndarray] = []
    for row in fresh:
        past.insert(0, correlate(coefficients, row.copy(), past))
    return np.array(past[::-1])


def test_what_is_released_follows_from_what_the_account_is_about() -> None:
    """A second server knows only C m_0 x + z, whole numbers that hide x as the account says, and not x or z."""
    generator = np.random.default_rng(2)
    sums, fresh = generator.integers(-500, 500, (12, 7)), generator.integers(-900, 900, (12, 7))
    noise = noise_of(fresh)
    released: list[list[int]] = []
    for number in range(12):
        hidden = sum(c * sums[number - lag] for lag, c in enumerate(COEFFICIENTS) if lag <= number) + fresh[number]
        row = []
        for element, value in enumerate(hidden.tolist()):
            for lag, c in enumerate(COEFFICIENTS[1:], start=1):
                if lag <= number:
                    value -= c * released[number - lag][element]
            row.append(math.floor(Fraction(value, COEFFICIENTS[0]) + Fraction(1, 2)))
        released.append(row)
        np.testing.assert_array_equal(sums[number] + noise[number], row)


def test_it_is_the_inverse_matrix_times_independent_noise() -> None:
    rounds = 40
    fresh = np.random.default_rng(4).integers(-(10**7), 10**7, (rounds, 50))
    matrix = sum(c / COEFFICIENTS[0] * np.eye(rounds, k=-lag) for lag, c in enumerate(COEFFICIENTS))
    expected = np.linalg.inv(np.asarray(matrix)) @ (fresh / COEFFICIENTS[0])
    # Each rounding moves a round by half a step at most, and later rounds by what the inverse makes of it.
    reach = np.abs(np.linalg.inv(np.asarray(matrix))).sum(axis=1).max() / 2
    assert np.abs(noise_of(fresh) - expected).max() < reach + 1e-6
    assert reach < 2


def test_each_round_draws_noise_of_the_stated_size() -> None:
    of = layout(4000)
    [group] = groups(of.updates)
    settings = correlated(noise_multiplier=0.05)
    past: list[np.ndarray] = []
    fresh = []
    for number in range(6):
        noise = draw_noise(settings, of, past, byte_source(f"row {number}"))
        # z = m_0 e_t + m_1 e_t-1 + ..., but for rounding.
        fresh.append(8 * noise + sum(c * e for c, e in zip(COEFFICIENTS[1:], past)))
        past.insert(0, noise)
    scale = noise_scale(group, 0.05 * 8)
    found = np.array(fresh)
    assert scale == math.ceil(0.05 * 8 * math.ceil(127.127 + math.sqrt(of.length) / 2))
    for row in found:
        assert row.std() == pytest.approx(scale, rel=5 / math.sqrt(2 * row.size))
    assert np.abs(np.corrcoef(found)[np.triu_indices(6, 1)]).max() < 5 / math.sqrt(of.length)
    # And the noise itself takes back noise of the round before.
    assert np.corrcoef(past[1], past[0])[0, 1] < -0.3


def test_what_the_rounds_cost() -> None:
    """By hand: a device that comes at rounds 0, 4, 8 changes C x by each coefficient once in four rounds."""
    settings = correlated()
    once = sum((c / 8) ** 2 for c in COEFFICIENTS)
    for rounds, squares in ((1, 1.0), (2, 1 + 25 / 64), (4, once), (8, 2 * once), (9, 2 * once + 1)):
        assert spread(settings, rounds) ** 2 == pytest.approx(squares, rel=1e-12)
        expected = spent_epsilon([Gaussian(noise_multiplier=2 / math.sqrt(squares))], 1e-5)
        assert spent_epsilon(events_of(settings, 0, rounds), 1e-5) == pytest.approx(expected, rel=1e-9)
        apart = [event for number in range(rounds) for event in events_of(settings, number)]
        assert spent_epsilon(apart, 1e-5) == pytest.approx(expected, rel=1e-9)
    # A round in which the worst device has no part any more is free.
    assert events_of(correlated(separation=9), 4) == []
    assert spent_epsilon(events_of(correlated(separation=9), 0, 9), 1e-5) == pytest.approx(
        spent_epsilon([Gaussian(noise_multiplier=2 / math.sqrt(once))], 1e-5), rel=1e-9
    )


def test_what_two_rounds_really_cost_is_within_the_account() -> None:
    """For one element the exact probabilities of both rounds' whole numbers: delta at the account's epsilon.

    The worst device comes to the first round alone (separation 2) and changes both rows.
    """
    coefficients, change, multiplier = (2, 1), 6, 1.5
    settings = correlated(noise_multiplier=multiplier, separation=2, coefficients=coefficients)
    scale = multiplier * change * 2
    epsilon = spent_epsilon(events_of(settings, 0, 2), 1e-3)
    at = np.arange(-400, 401)
    mass = np.exp(-(at**2) / (2 * scale**2))
    mass /= mass.sum()

    def moved(by: int) -> np.ndarray:
        return np.concatenate([np.zeros(by), mass[: len(mass) - by]])

    without = np.outer(mass, mass)
    with_device = np.outer(moved(2 * change), moved(change))
    gap = with_device - math.exp(epsilon) * without
    spent = gap[gap > 0].sum()
    assert spent <= 1e-3
    # As if the second round were free the account would say too little.
    too_little = spent_epsilon(events_of(settings, 0, 1), 1e-3)
    gap = with_device - math.exp(0.8 * too_little) * without
    assert gap[gap > 0].sum() > 1e-3


def test_settling_fills_in_coefficients_and_noise() -> None:
    given = DifferentialPrivacy(mechanism="correlated", epsilon=4.0, delta=1e-5, separation=10)
    found = settle(given, 60)
    assert found.coefficients[0] == 64
    assert len(found.coefficients) == 10
    assert spent_epsilon(events_of(found, 0, 60), 1e-5) <= 4.0 < spent_epsilon(events_of(found, 0, 61), 1e-5)
    # What was spent before leaves less.
    before = Repeated(event=Gaussian(noise_multiplier=20.0), count=50)
    more = settle(given, 60, (before,))
    assert more.noise_multiplier is not None
    assert found.noise_multiplier is not None
    assert more.noise_multiplier > found.noise_multiplier
    assert spent_epsilon([before, *events_of(more, 0, 60)], 1e-5) <= 4.0
    own = correlated()
    assert settle(own, 60) == own


def test_noise_that_does_not_fit() -> None:
    with pytest.raises(PolicyError, match="does not fit 64 bits"):
        correlate((64, 63), np.zeros(2, np.int64), [np.array([1 << 57, 0])])
    with pytest.raises(PolicyError, match="an earlier round's has"):
        correlate((64, 63), np.zeros(2, np.int64), [np.zeros(3, np.int64)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"separation": None}, "needs to know in how many rounds"),
        ({"separation": 1}, "take 'central'"),
        ({"coefficients": (8, 9)}, "none above the one before"),
        ({"coefficients": (8, 0)}, "none above the one before"),
        ({"coefficients": (8, -1)}, "none above the one before"),
        ({"coefficients": (1 << 17, 1)}, "none above the one before"),
        ({"coefficients": (1,) * 65}, "65 are more than 64"),
        ({"noise_multiplier": None}, "needs one of them"),
    ],
)
def test_settings_that_say_nothing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        correlated(**settings)
    with pytest.raises(PolicyError, match="separation and coefficients are for 'correlated'"):
        DifferentialPrivacy(mechanism="central", noise_multiplier=1.0, separation=3)
