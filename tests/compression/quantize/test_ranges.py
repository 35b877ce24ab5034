"""Ranges of activations and weights, against NumPy over all the values at once."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from archipel.compression import Examples
from archipel.compression.quantize.histograms import BINS, unsigned_grid
from archipel.compression.quantize.ranges import SAMPLE, Observer
from archipel.compression.quantize.weight_search import best_shares
from archipel.errors import CompressionError
from archipel.graph import Model

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
graph (float[batch, n] x) => (float[batch, n] y) { a = Mul (x, x)  b = Sub (a, x)  y = Relu (b) }"""


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_proto(onnx.parser.parse_model(TEXT))


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    """Long tails on both sides, of b = x^2 - x too."""
    return np.random.default_rng(0).standard_t(4, (150, 64)).astype(np.float32)


def values(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": x, "b": x * x - x, "y": np.maximum(x * x - x, 0)}


def test_minmax(model: Model, x: np.ndarray) -> None:
    found = Observer(batch_size=64).ranges(model, ["x", "b", "y"], Examples({"x": x}))
    for name, array in values(x).items():
        assert found[name].low == min(array.min(), 0)
        assert found[name].high == array.max()
    shifted = Observer().ranges(model, ["x"], Examples({"x": np.abs(x) + 3}))["x"]
    assert shifted.low == 0  # zeros need an integer of their own


@pytest.mark.parametrize("percent", [99.0, 99.9])
def test_percentile(model: Model, x: np.ndarray, percent: float) -> None:
    found = Observer("percentile", percent).ranges(model, ["x", "b", "y"], Examples({"x": x}))
    for name, array in values(x).items():
        width = float(array.max() - min(array.min(), 0)) / BINS
        expected = np.percentile(array, [100 - percent, percent], method="inverted_cdf")
        assert found[name].low == pytest.approx(min(expected[0], 0), abs=1.01 * width)
        assert found[name].high == pytest.approx(expected[1], abs=1.01 * width)
    symmetric = Observer("percentile", percent, "int8").ranges(model, ["x"], Examples({"x": x}))["x"]
    assert symmetric.low == -symmetric.high
    expected = np.percentile(np.abs(x), percent, method="inverted_cdf")
    assert symmetric.high == pytest.approx(expected, abs=2 * float(x.max() - x.min()) / BINS)


def error(array: np.ndarray, low: float, high: float) -> float:
    scale = (high - low) / 255
    zero = round(-low / scale)
    return float(np.square((np.clip(np.round(array / scale) + zero, 0, 255) - zero) * scale - array).mean())


def test_mse_is_as_good_as_a_search_over_both_ends(model: Model, x: np.ndarray) -> None:
    found = Observer("mse").ranges(model, ["x", "y"], Examples({"x": x}))
    for name, array in values(x).items():
        if name not in found:
            continue
        shares = np.linspace(0.02, 1, 50)
        lows = shares * array.min() if array.min() < 0 else [0.0]
        best = min(error(array, low, high) for low in lows for high in shares * array.max())
        reached = error(array, found[name].low, found[name].high)
        assert reached <= 1.05 * best
        assert reached < error(array, min(float(array.min()), 0), float(array.max()))


def test_mse_of_symmetric_integers(model: Model, x: np.ndarray) -> None:
    found = Observer("mse", kind="int8").ranges(model, ["x"], Examples({"x": x}))["x"]

    def symmetric(largest: float) -> float:
        scale = largest / 127
        return float(np.square(np.clip(np.round(x / scale), -128, 127) * scale - x).mean())

    best = min(symmetric(share * np.abs(x).max()) for share in np.linspace(0.02, 1, 200))
    assert symmetric(found.high) <= 1.05 * best


def test_of_large_values_a_sample_is_taken(model: Model) -> None:
    x = np.random.default_rng(0).standard_normal((8, SAMPLE // 2)).astype(np.float32)
    found = Observer("percentile", 99.0).ranges(model, ["x"], Examples({"x": x}))["x"]
    np.testing.assert_allclose([found.low, found.high], np.percentile(x, [1, 99]), rtol=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_values_that_are_not_finite(model: Model, bad: float, method: str) -> None:
    x = np.ones((3, 4), np.float32)
    x[1, 2] = bad
    with pytest.raises(CompressionError, match="calibration: 'b' is not finite"):
        Observer(method).ranges(model, ["y", "b"][1:], Examples({"x": x}))  # type: ignore[arg-type]


def test_grids() -> None:
    """By hand: -1..2 in 255 steps of 3/255, where 0 is the integer 85; and 127 steps of 2/127 on each side."""
    from archipel.compression.quantize.ranges import Range

    scale, zero = Range(-1.0, 2.0).grid("uint8")
    assert (scale, zero) == (np.float32(3 / 255), 85)
    scale, zero = Range(-1.0, 2.0).grid("int8")
    assert (scale, zero) == (np.float32(2 / 127), 0)
    assert Range(0.0, 0.0).grid("uint8") == (1.0, 0)


def test_best_shares_against_every_share() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_t(3, (6, 40))
    rows[5] = 0
    found = best_shares(rows, 7)
    for row, share in zip(rows[:5], found):

        def lost(fraction: float, row: np.ndarray = row) -> float:
            scale = np.abs(row).max() * fraction / 7
            return float(np.square(np.clip(np.round(row / scale), -8, 7) * scale - row).sum())

        assert lost(share) <= 1.02 * min(lost(fraction) for fraction in np.linspace(0.4, 1, 400))
    assert found[5] == 1


@pytest.mark.parametrize("low", [-0.001, -0.37, -1.0, -1.3, -2.9, -7.77])
@pytest.mark.parametrize("high", [0.0, 0.5, 1.9, 3.3])
def test_the_zero_point_is_the_nearest_integer(low: float, high: float) -> None:
    """As ONNX defines it for DynamicQuantizeLinear: the reference implementation, on the two ends of the range."""
    text = "g (float[2] x) => (uint8[2] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear (x) }"
    reference = ReferenceEvaluator(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'))
    _, scale, zero = reference.run(None, {"x": np.array([low, high], np.float32)})
    found = unsigned_grid(low, high)
    assert found[0] == pytest.approx(float(scale), rel=1e-6)
    assert found[1] == int(zero)
    assert abs(found[1] * found[0] + low) <= found[0] / 2 * (1 + 1e-6)
