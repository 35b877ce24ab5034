"""Statistics of tensors against NumPy's over the whole array."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from archipel.insight.tensor_statistics import describe


def test_of_a_large_tensor_in_blocks() -> None:
    numbers = np.random.default_rng(0).normal(3, 2, (3, 1_000_001)).astype(np.float32)
    numbers[0, :500_000] = 0
    found = describe(numbers, 20)
    whole = numbers.astype(np.float64)
    np.testing.assert_allclose([found.mean, found.deviation], [whole.mean(), whole.std()], rtol=1e-12)
    assert (found.low, found.high) == (whole.min(), whole.max())
    assert found.zeros == 500_000 / numbers.size
    assert found.counts == np.histogram(whole, 20)[0].tolist()


@settings(max_examples=40)
@given(arrays(np.float16, array_shapes(max_dims=3, max_side=6), elements=st.floats(width=16)))
def test_every_number_is_counted_once(numbers: np.ndarray) -> None:
    found = describe(numbers)
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    assert found.count == numbers.size
    assert found.odd == numbers.size - finite.size
    assert sum(found.counts) in (0, finite.size)
    if finite.size:
        np.testing.assert_allclose(found.mean, finite.mean(), rtol=1e-9, atol=1e-9)
        assert found.zeros == pytest.approx((finite == 0).mean())


def test_by_hand() -> None:
    found = describe(np.array([1, 1, 2, 5], np.int8), 4)
    assert (found.mean, found.deviation, found.low, found.high) == (2.25, pytest.approx(2.6875**0.5), 1, 5)
    assert found.counts == [2, 1, 0, 1]  # from 1, 2, 3, 4; the last bin has both of its ends
    assert found.sample == ["1", "1", "2", "5"]


def test_kinds_without_ordinary_numbers() -> None:
    assert describe(np.array([True, False, True, True])).mean == 0.75
    assert describe(np.array([1.5, -1.5], ml_dtypes.bfloat16)).high == 1.5
    assert describe(np.array([], np.float32)).mean is None
    assert describe(np.array([np.nan, np.inf])).odd == 2
    # No 40 numbers of 64 bits lie between these, and so no bins.
    assert describe(np.array([2**62, 2**62 + 1])).counts == []
