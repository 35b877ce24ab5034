"""Distributions over devices: figures against NumPy's, and bounds of what counts in bins can say."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.protocol.messages.distributions import Bins
from archipel.protocol.metrics.distributions import default_bins, distribution_from_counts, distribution_of, one_hot
from archipel.protocol.operator.results import Estimate

ACCURACY = Bins(low=0.0, high=1.0, count=20)
LOSS = Bins(low=0.01, high=10.0, count=30, scale="log", better="lower")
TENTHS = np.arange(1, 10) / 10


def figures(distribution: object) -> list[Estimate]:
    return [distribution.mean, *distribution.deciles, distribution.worst]  # type: ignore[attr-defined]


def expected(values: np.ndarray, better: str) -> list[float]:
    """By NumPy and a list: mean, deciles, and the mean of the worst tenth, rounded up."""
    worst = sorted(values.tolist(), reverse=better == "lower")[: -(-len(values) // 10)]
    return [float(values.mean()), *np.quantile(values, TENTHS).tolist(), sum(worst) / len(worst)]


@pytest.mark.parametrize("bins", [ACCURACY, LOSS])
@pytest.mark.parametrize("devices", [1, 9, 10, 11, 137])
def test_exact_figures_and_counts_are_numpy_s(bins: Bins, devices: int) -> None:
    rng = np.random.default_rng(devices)
    values = rng.beta(4, 2, devices) if bins is ACCURACY else rng.lognormal(0.0, 0.5, devices)
    found = distribution_of(values, bins)
    np.testing.assert_allclose([each.value for each in figures(found)], expected(values, bins.better), rtol=1e-12)
    assert {each.error for each in figures(found)} == {0.0}
    scale = np.linspace(0, 1, 21) if bins is ACCURACY else np.geomspace(0.01, 10, 31)
    np.testing.assert_allclose(found.edges, scale, rtol=1e-12)
    assert found.counts[1:-1] == np.histogram(values, found.edges)[0].tolist()
    assert found.devices == devices == sum(found.counts)


def test_edges_belong_to_the_bin_above_but_the_last() -> None:
    bins = Bins(low=-1.0, high=1.0, count=4)
    values = [-1.0, -0.5, 1.0, 0.99, math.nextafter(1.0, 2.0), -1.5, -math.ulp(0.0)]
    assert distribution_of(values, bins).counts == [1, 1, 2, 0, 2, 1]
    for value in values:
        assert one_hot(bins, value).tolist() == [float(n) for n in distribution_of([value], bins).counts]
    assert one_hot(bins, None).tolist() == [0.0] * 6


@pytest.mark.sampled(every=3)
@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60), st.sampled_from([ACCURACY, LOSS]))
def test_counts_tell_every_figure_within_the_stated_error(values: list[float], bins: Bins) -> None:
    told = distribution_from_counts(bins, np.array(distribution_of(values, bins).counts))
    known = True
    for figure, true in zip(figures(told), expected(np.array(values), bins.better), strict=True):
        if figure.error is None:
            known = False
            continue
        assert figure.error >= 0
        assert abs(figure.value - true) <= figure.error + 1e-9
    assert known or max(values) > bins.high
    # The mean depends on all devices, so it says whether one was beyond the bins.
    assert (told.mean.error is None) == (max(values) > bins.high)
    if bins is ACCURACY and told.mean.error is not None:
        assert max(each.error or 0 for each in figures(told)) <= 0.025 + 1e-12, "half the width of a bin"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"low": 1.0, "high": 1.0}, "low below high"),
        ({"low": math.nan, "high": 1.0}, "low below high"),
        ({"low": -math.inf, "high": 1.0}, "low below high"),
        ({"low": 0.0, "high": 1.0, "scale": "log"}, "scale 'log' must be above 0"),
        ({"low": 1.0, "high": math.nextafter(1.0, 2.0), "count": 20}, "too narrow"),
        ({"low": 0.0, "high": 1.0, "count": 101}, "<= 100"),
        ({"low": 0.0, "high": 1.0, "count": 0}, ">= 1"),
        ({"low": 0.0, "high": 1.0, "more": 0}, "unknown field"),
    ],
)
def test_bins_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(wrong, Bins)


def test_a_loss_has_bins_of_one_ratio_by_default() -> None:
    bins = default_bins("loss", 10.0)
    edges = bins.edges()
    np.testing.assert_allclose(edges[1:] / edges[:-1], 1e5 ** (1 / 40), rtol=1e-12)
    assert (bins.high, bins.better) == (10.0, "lower")
    assert default_bins("accuracy", 1.0) == Bins(low=0.0, high=1.0)
