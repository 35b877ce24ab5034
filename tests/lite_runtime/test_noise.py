from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from archipel.lite_runtime.noise import DiscreteGaussian


def byte_source(seed: str) -> Callable[[int], bytes]:
    state = {"block": 0}

    def read(count: int) -> bytes:
        out = b""
        while len(out) < count:
            out += hashlib.sha256(f"{seed}/{state['block']}".encode()).digest()
            state["block"] += 1
        return out[:count]

    return read


def chi_square_limit(freedom: int) -> float:
    # Wilson-Hilferty at 4.26 standard deviations: exceeded with probability 1e-5.
    return freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, Fraction(7, 3), 3.7, 10.25])
@pytest.mark.sampled(every=6)
def test_follows_the_exact_distribution(sigma: float | Fraction) -> None:
    count = 20_000
    samples = DiscreteGaussian(sigma, byte_source(f"chi {sigma}")).sample(count)
    reach = int(12 * float(sigma)) + 2
    weights = {k: math.exp(-k * k / (2 * float(sigma) ** 2)) for k in range(-reach, reach + 1)}
    total = math.fsum(weights.values())
    statistic, cells, expected_rest, seen_rest = 0.0, 0, float(count), count
    for k, weight in weights.items():
        expected = count * weight / total
        if expected < 10:
            continue
        seen = int((samples == k).sum())
        statistic += (seen - expected) ** 2 / expected
        expected_rest, seen_rest, cells = expected_rest - expected, seen_rest - seen, cells + 1
    if expected_rest >= 10:
        statistic += (seen_rest - expected_rest) ** 2 / expected_rest
        cells += 1
    assert statistic < chi_square_limit(cells - 1)


def test_a_large_sigma_has_its_variance() -> None:
    # For sigma >= 1 the variance is sigma^2 within 1e-7 (Canonne et al. 2020, section 2.1).
    samples = DiscreteGaussian(1e5, byte_source("large")).sample(4000)
    assert abs(samples.mean()) < 4.5 * 1e5 / math.sqrt(4000)
    assert abs(samples.var() / 1e10 - 1) < 4.5 * math.sqrt(2 / 4000)


def test_the_same_bytes_give_the_same_samples() -> None:
    first = DiscreteGaussian(2.5, byte_source("a")).sample(100)
    assert np.array_equal(first, DiscreteGaussian(2.5, byte_source("a")).sample(100))
    assert not np.array_equal(first, DiscreteGaussian(2.5, byte_source("b")).sample(100))
    assert first.dtype == np.int64


def test_the_systems_generator_is_the_default() -> None:
    samples = DiscreteGaussian(3.0).sample(64)
    assert samples.shape == (64,)
    assert not np.array_equal(samples, DiscreteGaussian(3.0).sample(64))


@pytest.mark.parametrize("sigma", [0.0, -1.0])
def test_sigma_must_be_positive(sigma: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        DiscreteGaussian(sigma)
