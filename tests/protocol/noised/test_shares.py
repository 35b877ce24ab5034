"""How much noise shares make: against the formulas of the paper, and exact divergences of small sums."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archipel.errors import PolicyError
from archipel.protocol.messages import NoiseShare
from archipel.protocol.noised.shares import LEAST_DEVIATION, choose_share, noise_multiplier, squared_norm


@pytest.mark.parametrize(("steps", "length"), [(256, 8), (1000, 1024), (4032, 1_015_808), (1, 2), (100_000, 3)])
def test_the_norm_is_that_of_the_paper(steps: int, length: int) -> None:
    """Equation 2 of Kairouz, Liu and Steinke 2021 for beta = exp(-1/2) and granularity 1, rounded down."""
    spread = math.sqrt(2 * math.log(1 / math.exp(-0.5)))
    exact = steps**2 + length / 4 + spread * (steps + math.sqrt(length) / 2)
    assert exact - 2 <= squared_norm(steps, length) <= exact


@pytest.mark.parametrize("devices", [1, 2, 3, 100])
@pytest.mark.parametrize("deviation", [1, 2, 4, 100])
def test_the_multiplier_is_that_of_the_paper(deviation: int, devices: int) -> None:
    """Theorem 1: (e^2 / 2)-concentrated, and continuous noise of multiplier z is (1 / z^2 / 2)-concentrated."""
    steps, length = 1000, 1024
    norm = math.sqrt(squared_norm(steps, length))
    tau = 10 * sum(math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, devices))
    e = norm / (math.sqrt(devices) * deviation) + tau * math.sqrt(length)
    found = noise_multiplier(NoiseShare(deviation=deviation, steps=steps), length, devices)
    assert found == pytest.approx(1 / e, rel=1e-12)
    if deviation >= LEAST_DEVIATION:
        assert found == pytest.approx(math.sqrt(devices) * deviation / norm, rel=1e-15)


@pytest.mark.parametrize(("deviation", "devices", "shift"), [(4, 2, 3), (4, 3, 20), (5, 5, 1), (6, 2, 12)])
def test_a_sum_of_shares_diverges_no_more_than_continuous_noise(deviation: int, devices: int, shift: int) -> None:
    """The exact Renyi divergence of a sum of discrete Gaussians from itself moved by `shift`, by convolution."""
    grid = np.arange(-40 * deviation, 40 * deviation + 1)
    one = np.exp(-(grid.astype(float) ** 2) / (2 * deviation**2))
    one /= one.sum()
    whole = one
    for _ in range(devices - 1):
        whole = np.convolve(whole, one)
    moved, here = whole[shift:], whole[:-shift]
    inside = (moved > 1e-290) & (here > 1e-290)
    sigma = math.sqrt(devices) * deviation
    for order in (1.5, 2.0, 8.0):
        powers = order * np.log(moved[inside]) + (1 - order) * np.log(here[inside])
        divergence = np.log(np.exp(powers).sum()) / (order - 1)
        assert divergence == pytest.approx(order * shift**2 / (2 * sigma**2), rel=1e-9)


@pytest.mark.parametrize("multiplier", [1e-3, 0.3, 1.0, 7.3, 100.0])
@pytest.mark.parametrize("length", [2, 1024, 1 << 20])
@pytest.mark.parametrize("devices", [1, 33, 4096])
def test_a_share_is_just_enough(multiplier: float, length: int, devices: int) -> None:
    share = choose_share(multiplier, length, devices)
    found = noise_multiplier(share, length, devices)
    # Noise is a whole number of steps, of which there are 4 or more.
    assert multiplier <= found <= multiplier * (1 + 1 / (share.deviation - 1))
    # Rounding adds less than 2% to what one device can change the sum by.
    assert share.steps <= math.sqrt(squared_norm(share.steps, length)) <= 1.02 * share.steps


def test_more_than_whole_numbers_hold_is_refused() -> None:
    with pytest.raises(PolicyError, match="take a multiplier nearer to 1"):
        choose_share(1e6, 1024, 1)
    with pytest.raises(PolicyError, match="take a multiplier nearer to 1"):
        choose_share(1e-9, 1024, 100)
