"""Statistics in pieces, against NumPy on everything at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from archipel.datasets import ArrayDataset, summarize, taking, write_records
from tests.datasets.readers.test_records import Words


@pytest.mark.sampled(every=3)
@settings(max_examples=60)
@given(st.data())
def test_as_numpy_on_everything_at_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    shape = data.draw(st.sampled_from([(), (3,), (2, 2), (2, 2, 3)]))
    dtype = data.draw(st.sampled_from(["float32", "float64", "uint8", "int64", "bool"]))
    elements = {"f": st.floats(-1e6, 1e6, width=32) | st.sampled_from([np.nan, np.inf, -np.inf]),
                "i": st.integers(-(10**6), 10**6)}.get(np.dtype(dtype).kind)  # fmt: skip
    x = data.draw(hnp.arrays(dtype, (count, *shape), elements=elements))
    rows = data.draw(st.integers(1, 50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taking, "_PIECE_ELEMENTS", rows * int(np.prod(shape)))
        summary = summarize({"x": x}, bins=4)
    found, exact = summary.fields["x"], x.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    assert (summary.examples, summary.bytes, found.values) == (count, x.nbytes, x.size)
    assert (found.missing, found.infinite) == (np.isnan(exact).sum(), np.isinf(exact).sum())
    if not finite.size:
        assert found.mean is found.std is found.low is found.high is None
        return
    assert (found.low, found.high) == (finite.min(), finite.max())
    scale = np.abs(finite).max() + 1e-300
    np.testing.assert_allclose(found.mean, finite.mean(), rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(found.std, finite.std(), rtol=1e-9, atol=1e-12 * scale)
    assert found.histogram == np.histogram(finite, 4)[0].tolist() or found.low == found.high
    assert sum(found.histogram) == finite.size
    if found.means and np.isfinite(exact).all():
        axes = tuple(range(exact.ndim - 1))
        np.testing.assert_allclose(found.means, exact.mean(axis=axes), rtol=1e-12, atol=1e-12 * scale)
        np.testing.assert_allclose(found.stds, exact.std(axis=axes), rtol=1e-9, atol=1e-12 * scale)
    if not shape and dtype in ("uint8", "int64", "bool"):
        assert found.classes == {
            str(int(k)): v for k, v in zip(*(a.tolist() for a in np.unique(x, return_counts=True)))
        }


def test_a_small_deviation_far_from_zero() -> None:
    # The sum of squares minus the squared sum loses all digits here.
    x = 1e9 + np.random.default_rng(0).normal(size=20_000)
    found = summarize({"x": x}).fields["x"]
    np.testing.assert_allclose(found.std, x.std(), rtol=1e-8)


def test_classes_lengths_and_progress(tmp_path: Path) -> None:
    data = ArrayDataset({"label": np.array([2, 0, 2])}, classes={"label": ("cat", "dog", "ant")})
    assert summarize(data).fields["label"].classes == {"cat": 1, "dog": 0, "ant": 2}
    tokens = ArrayDataset({"x": np.array([[0, 1], [1, 1]])}, classes={"x": "ab"})
    assert summarize(tokens).fields["x"].classes == {"a": 1, "b": 3}
    assert summarize({"x": np.arange(1001)}).fields["x"].classes == {}
    write_records(Words(), tmp_path / "words.parquet")
    seen: list[int] = []
    for words in (Words(), tmp_path / "words.parquet"):
        found = summarize(words, progress=seen.append).fields["sound"]
        # Row i has i times the number i in two channels; what fills up shorter ones does not count.
        values = np.repeat(np.arange(9), np.arange(9))
        assert found.values == 2 * len(values)
        np.testing.assert_allclose([found.mean, found.std], [values.mean(), values.std()], rtol=1e-12)
        assert found.low == 1
    assert seen[-1] == 9
