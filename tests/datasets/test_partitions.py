"""Splits of examples over devices: every example once, and the mixtures that were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from archipel.datasets import split_by, split_dirichlet, split_iid
from archipel.errors import DatasetError

LABELS = np.arange(2000) % 10


def complete(parts: list[np.ndarray], count: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))


def test_iid_parts_are_of_one_size_and_have_all_labels() -> None:
    parts = split_iid(len(LABELS), 7, seed=1)
    complete(parts, len(LABELS))
    assert {len(part) for part in parts} == {285, 286}
    for part in parts:
        assert np.bincount(LABELS[part]).min() > 10
    assert all((a == b).all() for a, b in zip(parts, split_iid(len(LABELS), 7, seed=1), strict=True))
    assert not np.array_equal(parts[0], split_iid(len(LABELS), 7, seed=2)[0])


@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_dirichlet_mixtures_vary_as_their_distribution_does(alpha: float) -> None:
    devices, found = 8, []
    for seed in range(20):
        parts = split_dirichlet(LABELS, devices, alpha=alpha, seed=seed)
        complete(parts, len(LABELS))
        found.append([np.bincount(LABELS[part], minlength=10) / 200 for part in parts])
    shares = np.array(found)
    # A share of a symmetric Dirichlet distribution over k: mean 1/k, variance (k - 1) / k^2 (k alpha + 1).
    expected = (devices - 1) / (devices**2 * (devices * alpha + 1))
    assert shares.mean() == pytest.approx(1 / devices)
    assert shares.var() == pytest.approx(expected, rel=0.25)


def test_groups_stay_together_and_are_spread_evenly() -> None:
    groups = np.array([f"person {index % 30}" for index in range(900)])
    parts = split_by(groups, 10, seed=0)
    complete(parts, 900)
    assert [len(part) for part in parts] == [90] * 10
    seen = [set(groups[part]) for part in parts]
    assert sum(map(len, seen)) == 30
    each = split_by(np.array(["b", "a", "b", "c", "a"]))
    assert [part.tolist() for part in each] == [[1, 4], [0, 2], [3]]


def test_what_cannot_be_split_is_told() -> None:
    with pytest.raises(DatasetError, match="3 examples are too few for 4 devices"):
        split_iid(3, 4)
    with pytest.raises(DatasetError, match="2 groups are too few for 3 devices"):
        split_by(np.array([0, 0, 1, 1]), 3)
    with pytest.raises(DatasetError, match="larger alpha or fewer devices"):
        split_dirichlet(np.zeros(10, int), 9, alpha=0.001)
    with pytest.raises(DatasetError, match="whole number"):
        split_dirichlet(np.zeros(10), 2, alpha=1.0)
