from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from archipel.lite_runtime import many_samples
from archipel.lite_runtime.many_samples import sample_gaussian
from archipel.lite_runtime.noise import DiscreteGaussian
from tests.lite_runtime.test_noise import chi_square_limit


@pytest.mark.parametrize("scale", [1, 2, 3, 10, 40])
@pytest.mark.sampled(every=6)
def test_follows_the_exact_distribution(scale: int) -> None:
    count = 100_000
    samples = sample_gaussian(scale, count, Random(scale).randbytes)
    reach = 12 * scale
    weights = {k: math.exp(-k * k / (2 * scale**2)) for k in range(-reach, reach + 1)}
    total = math.fsum(weights.values())
    statistic, cells, rest = 0.0, 0, [float(count), float(count)]
    for k, weight in weights.items():
        expected, seen = count * weight / total, int((samples == k).sum())
        if expected >= 10:
            statistic += (seen - expected) ** 2 / expected
            cells, rest = cells + 1, [rest[0] - expected, rest[1] - seen]
    statistic += (rest[1] - rest[0]) ** 2 / max(rest[0], 10.0)
    assert statistic < chi_square_limit(cells)


@pytest.mark.parametrize("scale", [32767 * 3, many_samples.LARGEST])
def test_large_scales_have_their_moments(scale: int) -> None:
    # For scales of 1 and more the variance is scale^2 within 1e-7 (Canonne et al. 2020, section 2.1).
    samples = sample_gaussian(scale, 100_000, Random(4).randbytes) / scale
    assert abs(samples.mean()) < 4.5 / math.sqrt(100_000)
    assert abs(samples.var() - 1) < 4.5 * math.sqrt(2 / 100_000)
    assert abs((samples**4).mean() - 3) < 4.5 * math.sqrt(96 / 100_000)
    assert np.abs(samples).max() < 6.5


def test_scales_beyond_64_bits_are_drawn_one_by_one() -> None:
    scale = many_samples.LARGEST + 1
    found = sample_gaussian(scale, 20, Random(1).randbytes)
    np.testing.assert_array_equal(found, DiscreteGaussian(scale, Random(1).randbytes).sample(20))


def test_numbers_below_a_bound_are_uniform() -> None:
    for bound in (3, 5, 6, 1000):
        found = many_samples._below(np.full(60_000, bound), Random(bound).randbytes)
        counts = np.bincount(found, minlength=bound)
        assert counts.size == bound
        statistic = ((counts - 60_000 / bound) ** 2 / (60_000 / bound)).sum()
        assert statistic < chi_square_limit(bound - 1)
    # The words beyond the last whole multiple are not folded onto small numbers.
    words = iter([b"\xff" * 8, (7).to_bytes(8, "little")])
    assert many_samples._below(np.array([3]), lambda _: next(words)).tolist() == [1]


def test_the_same_bytes_give_the_same_samples() -> None:
    first = sample_gaussian(5, 1000, Random(1).randbytes)
    assert first.dtype == np.int64
    assert first.shape == (1000,)
    np.testing.assert_array_equal(first, sample_gaussian(5, 1000, Random(1).randbytes))
    assert not np.array_equal(first, sample_gaussian(5, 1000, Random(2).randbytes))
    assert not np.array_equal(sample_gaussian(5, 1000), sample_gaussian(5, 1000))
    assert sample_gaussian(5, 0).shape == (0,)


@pytest.mark.parametrize("scale", [0, -1])
def test_the_scale_is_one_or_more(scale: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        sample_gaussian(scale, 1)
