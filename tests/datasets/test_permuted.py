"""The permutation that is drawn in parts, for data sets too large for one in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.datasets import order
from archipel.datasets.order import Order
from archipel.permutations import permuted
from tests.datasets.test_batches import numbered


@settings(max_examples=60)
@given(count=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 100))
def test_every_number_comes_once(count: int, seed: int, epoch: int) -> None:
    drawn = permuted(np.arange(count), count, seed, 0, epoch)
    assert sorted(drawn.tolist()) == list(range(count))
    # Any part of it is the same without the rest.
    assert np.array_equal(permuted(np.arange(count // 3, count), count, seed, 0, epoch), drawn[count // 3 :])


def test_a_count_beyond_memory() -> None:
    count = 10**13
    drawn = permuted(np.arange(count - 1000, count), count, 1, 0, 0)
    assert len(set(drawn.tolist())) == 1000
    assert 0 <= drawn.min() < count // 100 < count - count // 100 < drawn.max() < count


@pytest.mark.parametrize("count", [1 << 22, (1 << 22) + 12345])
def test_places_are_uniform_and_neighbours_are_apart(count: int) -> None:
    part = 1 << 16
    drawn = np.stack([permuted(np.arange(part), count, seed, 0, 0) for seed in range(4)])
    share = drawn.size / 64
    counts = np.bincount((drawn.ravel() * 64 // count), minlength=64)
    # Chi-square with 63 degrees of freedom: 116 is exceeded with probability 5e-5.
    assert ((counts - share) ** 2 / share).sum() < 116
    steps = (np.diff(drawn, axis=1) % count * 64 // count).ravel()
    counts = np.bincount(steps, minlength=64)
    assert ((counts - len(steps) / 64) ** 2 / (len(steps) / 64)).sum() < 116
    # Lowest bits, too.
    assert abs(float((drawn & 1).mean()) - 0.5) < 0.004


def test_large_data_sets_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_DRAWN_AT_ONCE", 10)
    epoch = Order(numbered(50), True, 3).rows(0, 0, 50)
    assert np.array_equal(epoch, permuted(np.arange(50), 50, 3, 0, 0))
