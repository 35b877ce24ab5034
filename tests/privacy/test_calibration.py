from __future__ import annotations

import math

import pytest

from archipel.client.memory.privacy import noise_for
from archipel.errors import PolicyError
from archipel.privacy import Gaussian, Poisson, Repeated, least_multiplier, spent_epsilon


@pytest.mark.parametrize(("epsilon", "delta", "rounds"), [(1.0, 1e-6, 1), (3.0, 1e-5, 100), (8.0, 1e-9, 2000)])
def test_it_is_enough_and_no_more(epsilon: float, delta: float, rounds: int) -> None:
    found = least_multiplier(epsilon, delta, rounds)

    def cost(multiplier: float) -> float:
        return spent_epsilon([Repeated(event=Gaussian(noise_multiplier=multiplier), count=rounds)], delta)

    assert cost(found) <= epsilon < cost(found * (1 - 1e-5))


def test_as_devices_calibrate_their_own_noise() -> None:
    # The device's formula has a finer grid of orders, so it needs a little less noise.
    other = noise_for(3.0, 100, 1e-6)
    assert other <= least_multiplier(3.0, 1e-6, 100) < 1.01 * other


@pytest.mark.sampled(every=3)
def test_opacus() -> None:
    # opacus/tests/accountants_test.py asks for epsilon 8; its search stops at a noise whose epsilon is less by 0.1.
    found = least_multiplier(8.0, 1e-5, 2250, probability=0.04)
    assert found == pytest.approx(1.425307617, rel=1e-2)
    for multiplier in (found, 1.425307617):
        event = Poisson(probability=0.04, event=Gaussian(noise_multiplier=multiplier))
        assert 7.85 < spent_epsilon([Repeated(event=event, count=2250)], 1e-5) <= 8.0


def test_what_is_spent_already_counts() -> None:
    spent = Repeated(event=Gaussian(noise_multiplier=20.0), count=100)
    found = least_multiplier(3.0, 1e-5, 100, before=[spent])
    # Costs of 1 / z^2 add up, so those of the rounds are the whole less 100 / 20^2.
    alone = least_multiplier(3.0, 1e-5, 100)
    assert found == pytest.approx(1 / math.sqrt(1 / alone**2 - 1 / 400), rel=1e-4)
    with pytest.raises(PolicyError, match=r"4.729 of 3 is spent already"):
        least_multiplier(3.0, 1e-5, 1, before=[Repeated(event=Gaussian(noise_multiplier=10.0), count=100)])


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds"), [(0.0, 1e-6, 1), (math.nan, 1e-6, 1), (1.0, 0.0, 1), (1.0, 1e-6, 0)]
)
def test_numbers_out_of_bounds(epsilon: float, delta: float, rounds: int) -> None:
    with pytest.raises(PolicyError):
        least_multiplier(epsilon, delta, rounds)


def test_a_target_that_no_noise_reaches() -> None:
    with pytest.raises(PolicyError, match="no noise makes 100000000 rounds cost at most"):
        least_multiplier(1e-9, 1e-12, 100_000_000)
