"""Two forms of one model, value by value, against NumPy."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from archipel.compression.agreement import bootstrap, wald_plus_two
from archipel.compression.compare import Comparison, Row, compare
from archipel.errors import CompressionError
from archipel.graph import Model

RNG = np.random.default_rng(11)
W = RNG.standard_normal((6, 8)).astype(np.float32)
V = RNG.standard_normal((8, 3)).astype(np.float32)
X = RNG.standard_normal((50, 6)).astype(np.float32)

PLAIN = """g (float[n, 6] x) => (float[n, 3] y) <float[6, 8] w, float[8, 3] v>
{ h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"""


def model(text: str, **weights: np.ndarray) -> Model:
    import onnx_ir as ir

    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return Model(ir.from_proto(onnx.shape_inference.infer_shapes(proto)))


def snr(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return 10 * math.log10(np.square(a).sum() / np.square(a - b).sum())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def row(result: Comparison, name: str) -> Row:
    [found] = [row for row in result.rows if row.name == name]
    return found


def test_against_numpy() -> None:
    """Outputs over all examples, values inside over the first rows, whatever the batches."""
    other = (W + 0.1 * RNG.standard_normal(W.shape)).astype(np.float32)
    for batch_size in (1, 7, 64):
        result = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=other, v=V), {"x": X}, rows=20, batch_size=batch_size)
        assert (result.examples, result.compared, result.unmatched) == (50, 20, ())
        assert [(r.name, r.output, r.position, r.layer) for r in result.rows] == [
            ("y", True, 2, "MatMul v"), ("h", False, 0, "MatMul w"), ("r", False, 1, "MatMul w + Relu")
        ]  # fmt: skip
        h, h2 = X @ W, X @ other
        for name, a, b in (("h", h[:20], h2[:20]), ("r", h[:20].clip(0), h2[:20].clip(0)),
                           ("y", h.clip(0) @ V, h2.clip(0) @ V)):  # fmt: skip
            found = row(result, name)
            assert found.snr_db == pytest.approx(snr(a, b), abs=1e-3)
            assert found.cosine == pytest.approx(cosine(a, b), abs=1e-6)
            assert found.largest == pytest.approx(np.abs(a - b).max(), rel=1e-4)


def test_the_ratio_is_that_of_onnxruntime() -> None:
    from onnxruntime.quantization.qdq_loss_debug import compute_signal_to_quantization_noice_ratio

    result = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=W * np.float32(1.01), v=V), {"x": X})
    expected = compute_signal_to_quantization_noice_ratio(X @ W, X @ (W * np.float32(1.01)))
    assert row(result, "h").snr_db == pytest.approx(expected, abs=1e-3)
    assert row(result, "h").snr_db == pytest.approx(40.0, abs=1e-3)


def test_the_same_graph_is_equal_everywhere() -> None:
    result = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=W, v=V), X)
    assert [r.snr_db for r in result.rows] == [math.inf] * 3
    assert result.first_divergence is None
    assert result.agreement == 1


def test_dequantized_values_stand_for_the_float_tensor() -> None:
    quantized = """g (float[n, 6] x) => (float[n, 3] y)
    <float[6, 8] w, float[8, 3] v, float s = {0.125}, uint8 z = {3}>
    { r = MatMul (x, w) c = Relu (r) q = QuantizeLinear (c, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, v) }"""
    plain = PLAIN.replace("r =", "c =").replace("(r,", "(c,")
    result = compare(model(plain, w=W, v=V), model(quantized, w=W, v=V), X)
    c = (X @ W).clip(0)
    step = (np.rint(c / 0.125) + 3).clip(0, 255) - 3
    found = row(result, "c")
    assert found.snr_db == pytest.approx(snr(c, step * 0.125), abs=1e-3)
    assert 25 < snr(c, step * 0.125) < 45
    assert row(result, "h").snr_db == math.inf


def test_integers_between_integer_operators() -> None:
    """QLinearMatMul to QLinearMatMul: the value between is uint8, with a scale of its own."""
    a = """g (float[n, 6] x) => (float[n, 3] y) <float[6, 8] w, float[8, 3] v>
    { h = MatMul (x, w) y = MatMul (h, v) }"""
    b = """g (float[n, 6] x) => (float[n, 3] y) <float s = {0.5}, int8 z = {0}, int8[6, 8] w_quantized,
    int8[8, 3] v_quantized, float t = {4.0}> {
      xq = QuantizeLinear (x, s, z)
      first = QLinearMatMul (xq, s, z, w_quantized, s, z, s, z)
      second = QLinearMatMul (first, s, z, v_quantized, s, z, t, z)
      y = DequantizeLinear (second, t, z) }"""
    w, v = (RNG.integers(-3, 4, shape).astype(np.int8) for shape in ((6, 8), (8, 3)))
    x = (RNG.integers(-4, 5, (9, 6)) / 2).astype(np.float32)
    h = np.rint(x @ (w / 2) / 0.5).clip(-128, 127) * 0.5
    y = np.rint(h @ (v / 2) / 4).clip(-128, 127) * 4
    result = compare(
        model(a, w=(w / 2).astype(np.float32), v=(v / 2).astype(np.float32)), model(b, w_quantized=w, v_quantized=v), x
    )
    found = row(result, "h")
    assert (found.counterpart, found.layer) == ("first", "MatMul w")
    assert found.snr_db == pytest.approx(snr(x @ (w / 2), h), abs=1e-3)
    assert row(result, "y").snr_db == pytest.approx(snr(x @ (w / 2) @ (v / 2), y), abs=1e-3)


def test_renamed_values_are_found_by_weight_and_structure() -> None:
    renamed = PLAIN.replace("h", "one").replace("r =", "two =").replace("(r,", "(two,").replace("y", "out")
    result = compare(model(PLAIN, w=W, v=V), model(renamed, w=W, v=V), X)
    assert [(r.name, r.counterpart, r.snr_db) for r in result.rows] == [
        ("y", "out", math.inf), ("h", "one", math.inf), ("r", "two", math.inf)
    ]  # fmt: skip
    tail = """g (float[n, 6] x) => (float[n] y) <float[6, 8] w>
    { NAMES0 = MatMul (x, w) NAMES1 = Tanh (NAMES0) NAMES2 = Exp (NAMES1) y = ReduceMax <keepdims = 0> (NAMES2) }"""
    first, second = (tail.replace("float[n] y", "float[k] y").replace("NAMES", name) for name in "ab")
    result = compare(model(first, w=W), model(second, w=W), X)
    assert {r.name: r.counterpart for r in result.rows} == {"y": "y", "a0": "b0", "a1": "b1", "a2": "b2"}


NORMED = """g (float[n, 2, 5, 5] x) => (float[n, 4, 1, 1] y) <float[4, 2, 3, 3] w, float[4] s, float[4] b, float[4] m,
float[4] u> { c = Conv (x, w) k = BatchNormalization (c, s, b, m, u) r = Relu (k) y = GlobalAveragePool (r) }"""
FOLDED = """g (float[n, 2, 5, 5] x) => (float[n, 4, 1, 1] y) <float[4, 2, 3, 3] w, float[4] bias>
{ c = Conv (x, w, bias) r = Relu (c) y = GlobalAveragePool (r) }"""


def normalized() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    w = RNG.standard_normal((4, 2, 3, 3)).astype(np.float32)
    s, b, m = (RNG.standard_normal(4).astype(np.float32) for _ in range(3))
    u = RNG.uniform(0.5, 2, 4).astype(np.float32)
    factor = s / np.sqrt(u + 1e-5)
    folded = {"w": w * factor[:, None, None, None], "bias": (b - m * factor).astype(np.float32)}
    return {"w": w, "s": s, "b": b, "m": m, "u": u}, folded, RNG.standard_normal((6, 2, 5, 5)).astype(np.float32)


def test_a_folded_normalization_ends_where_the_folded_layer_does() -> None:
    """Both graphs have a value "c", and they are not the same one."""
    whole, folded, x = normalized()
    result = compare(model(NORMED, **whole), model(FOLDED, **folded), x)
    assert result.unmatched == ("c",)
    assert row(result, "k").counterpart == "c"
    assert all(r.snr_db is not None and r.snr_db > 100 for r in result.rows)


def test_a_relu_that_a_quantizer_left_to_the_range_of_the_integers() -> None:
    whole, folded, x = normalized()
    integers = FOLDED.replace("r = Relu (c)", "q = QuantizeLinear (c, t, z) r = DequantizeLinear (q, t, z)").replace(
        "float[4] bias", "float[4] bias, float t = {0.125}, uint8 z = {0}"
    )
    result = compare(model(NORMED, **whole), model(integers, **folded), x)
    assert result.unmatched == ("c", "k")
    assert row(result, "r").layer == "Conv w + Relu"
    assert 30 < (row(result, "r").snr_db or 0) < 60


def test_a_relu_that_was_moved_behind_a_pooling() -> None:
    """As in int8 models: the results are equal, and the layer is compared without the Relu."""
    first = """g (float[n, 1, 6, 6] x) => (float[n, 2, 2, 2] y) <float[2, 1, 3, 3] w>
    { c = Conv (x, w) r = Relu (c) y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r) }"""
    moved = first.replace("r = Relu (c) y", "m").replace("(r) }", "(c) y = Relu (m) }")
    kernel = RNG.standard_normal((2, 1, 3, 3)).astype(np.float32)
    result = compare(model(first, w=kernel), model(moved, w=kernel), RNG.standard_normal((9, 1, 6, 6)).astype("f"))
    assert result.unmatched == ("r",)
    assert [(r.name, r.counterpart, r.snr_db) for r in result.rows] == [("y", "y", math.inf), ("c", "c", math.inf)]


def test_one_layer_that_became_two() -> None:
    left, sizes, right = np.linalg.svd(W, full_matrices=False)
    low = """g (float[n, 6] x) => (float[n, 3] y) <float[6, 6] w_left, float[6, 8] w_right, float[8, 3] v>
    { a = MatMul (x, w_left) b = MatMul (a, w_right) r = Relu (b) y = MatMul (r, v) }"""
    halves = {"w_left": left, "w_right": (np.diag(sizes) @ right).astype(np.float32)}
    result = compare(model(PLAIN, w=W, v=V), model(low, v=V, **halves), X)
    assert row(result, "h").counterpart == "b"
    assert (row(result, "h").snr_db or 0) > 90


def test_pruned_channels_are_not_compared() -> None:
    small = PLAIN.replace("8]", "5]").replace("[8,", "[5,")
    result = compare(model(PLAIN, w=W, v=V), model(small, w=W[:, :5], v=V[:5]), X)
    assert row(result, "h").reason == "not comparable: 8 against 5 channels"
    assert (row(result, "h").snr_db, row(result, "h").cosine) == (None, None)
    assert row(result, "y").snr_db == pytest.approx(snr((X @ W).clip(0) @ V, (X @ W[:, :5]).clip(0) @ V[:5]), abs=1e-3)


def test_a_convolution_along_one_axis_written_as_two() -> None:
    one = """g (float[n, 2, 9] x) => (float[n, 3, 7] y) <float[3, 2, 3] w> { c = Conv (x, w) y = Neg (c) }"""
    two = """g (float[n, 2, 9] x) => (float[n, 3, 7] y) <float[3, 2, 1, 3] w, int64[1] a = {2}>
    { u = Unsqueeze (x, a) c = Conv (u, w) d = Squeeze (c, a) y = Neg (d) }"""
    w = RNG.standard_normal((3, 2, 3)).astype(np.float32)
    result = compare(model(one, w=w), model(two, w=w[:, :, None]), RNG.standard_normal((4, 2, 9)).astype(np.float32))
    assert (row(result, "c").snr_db or 0) > 100


def test_the_first_that_diverges() -> None:
    """In the order of the graph, and not the output because it is listed first."""
    broken = V.copy()
    broken[0] = 9
    result = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=W, v=broken), X)
    assert result.first_divergence is not None
    assert result.first_divergence.name == "y"
    result = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=-W, v=V), X)
    assert result.first_divergence is not None
    assert (result.first_divergence.name, result.first_divergence.layer) == ("h", "MatMul w")
    # h is the opposite: the noise is twice as large as the signal.
    assert result.first_divergence.snr_db == pytest.approx(-20 * math.log10(2), abs=1e-4)
    assert result.first_divergence.cosine == pytest.approx(-1, abs=1e-6)
    below = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=-W, v=V), X, threshold=-50)
    assert below.first_divergence is None


def test_what_is_not_finite() -> None:
    log = "g (float[n, 6] x) => (float[n, 6] y) <float[6] w> { m = Mul (x, w) l = Log (m) y = Neg (l) }"
    x = np.abs(X)
    x[0, 0] = 0  # -inf in both, as in the mask of an attention
    ones = np.ones(6, np.float32)
    result = compare(model(log, w=ones), model(log, w=ones * np.float32(1.001)), {"x": x})
    assert row(result, "l").snr_db == pytest.approx(snr(np.log(x[1:]), np.log(x[1:] * 1.001)), abs=0.5)
    lost = ones.copy()
    lost[3] = 0
    result = compare(model(log, w=ones), model(log, w=lost), {"x": x})
    found = row(result, "l")
    assert (found.snr_db, found.reason) == (-math.inf, "not finite in one of the two: 50 elements")
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["rows"][0]["snr_db"] is None


def test_accuracy_and_agreement() -> None:
    other = (W + 0.3 * RNG.standard_normal(W.shape)).astype(np.float32)
    labels = RNG.integers(0, 3, 50)
    result = compare(model(PLAIN, w=W, v=V), model(PLAIN, w=other, v=V), {"x": X, "label": labels}, batch_size=8)
    a, b = (((X @ w).clip(0) @ V).argmax(axis=1) for w in (W, other))
    assert result.agreement == (a == b).mean()
    found = result.accuracy
    assert found is not None
    assert (found.a, found.b, found.labels) == ((a == labels).mean(), (b == labels).mean(), 50)
    assert found.only_a == ((a == labels) & (b != labels)).sum()
    assert found.only_b == ((b == labels) & (a != labels)).sum()
    assert found.only_a + found.only_b > 2
    assert found.low < found.difference < found.high
    assert "Agresti and Min 2005" in found.method


def test_the_interval_by_hand() -> None:
    """With 3 and 8 discordant pairs of 100: 5/102 -+ 1.96 sqrt(12 - 25/102) / 102."""
    assert wald_plus_two(3, 8, 100) == pytest.approx((-0.0168607, 0.1148999), abs=1e-6)
    assert wald_plus_two(0, 0, 1)[0] >= -1


def test_labels_of_one_example_stand_and_fall_together() -> None:
    """Three labels an example, [n, 3] of an output [n, 3, 4]: the interval resamples examples."""
    text = "g (float[n, 3, 4] x) => (float[n, 3, 4] y) <float[4] w> { y = Mul (x, w) }"
    x = RNG.standard_normal((80, 3, 4)).astype(np.float32)
    w = np.array([1, -1, 1, 1], np.float32)
    labels = x.argmax(axis=2)
    result = compare(model(text, w=np.ones(4, np.float32)), model(text, w=w), {"x": x, "label": labels})
    found = result.accuracy
    assert found is not None
    gain = ((x * w).argmax(axis=2) == labels).mean(axis=1) - 1
    assert (found.a, found.difference) == (1, pytest.approx(gain.mean()))
    half = 1.96 * gain.std() / math.sqrt(80)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert "bootstrap" in found.method


def test_the_bootstrap_is_that_of_resampled_examples() -> None:
    differences = RNG.choice([-1.0, 0.0, 1.0], 60, p=[0.1, 0.6, 0.3])
    draws = np.random.default_rng(5).integers(0, 60, (20_000, 60))
    expected = np.percentile(differences[draws].mean(axis=1), [2.5, 97.5])
    assert bootstrap(differences, 0) == pytest.approx(tuple(expected), abs=0.02)


@pytest.mark.sampled(every=3)
def test_memory_is_that_of_a_batch() -> None:
    wide = np.ones((6, 4096), np.float32)
    text = """g (float[n, 6] x) => (float[n, 6] y) <float[6, 4096] w, float[4096, 6] v>
    { h = MatMul (x, w) r = Relu (h) s = Sigmoid (r) y = MatMul (s, v) }"""
    x = np.ones((256, 6), np.float32)
    models = [model(text, w=wide, v=wide.T.copy()) for _ in "ab"]
    compare(*models, x[:8])
    tracemalloc.start()
    compare(*models, x, rows=256, batch_size=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 256 * 4096 * 4 / 4  # three values of all examples have 12 MiB, of 8 examples 0.4 MiB


def test_half_precision_is_fed_in_its_own_type() -> None:
    half = """g (float16[n, 6] x) => (float16[n, 3] y) <float16[6, 8] w, float16[8, 3] v>
    { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"""
    result = compare(model(PLAIN, w=W, v=V), model(half, w=W.astype(np.float16), v=V.astype(np.float16)), X)
    assert all(50 < (r.snr_db or 0) < 90 for r in result.rows)
    assert len(result.rows) == 3


def test_a_fixed_batch() -> None:
    fixed = PLAIN.replace("[n,", "[5,")
    result = compare(model(fixed, w=W, v=V), model(PLAIN, w=W, v=V), X[:10], rows=3)
    assert (result.examples, result.compared) == (10, 5)
    with pytest.raises(CompressionError, match="11 examples, but the graph takes 5 at a time"):
        compare(model(fixed, w=W, v=V), model(PLAIN, w=W, v=V), X[:11])
    with pytest.raises(CompressionError, match="a takes batches of 5 and b of 2"):
        compare(model(fixed, w=W, v=V), model(PLAIN.replace("[n,", "[2,"), w=W, v=V), X[:10])


@pytest.mark.parametrize(
    ("b", "data", "text"),
    [
        (PLAIN, {"z": X}, "the model has the inputs"),
        (PLAIN, {"x": X[:, :4]}, "input 'x' has the shape"),
        (PLAIN, {"x": X, "label": np.zeros((50, 2), np.int64)}, "labels of shape"),
        (PLAIN.replace("h = MatMul (x, w)", "h = MatMul (x, w) p = Identity (v)")
         .replace("(float[n, 3] y)", "(float[n, 3] o, float[8, 3] p)").replace("y =", "o ="), {"x": X}, "no output of"),
        (PLAIN.replace("(float[n, 6] x)", "(float[n, 6] x, float[n, 1] t)"), {"x": X}, "model b has the inputs x, t"),
        (PLAIN.replace("Relu (h)", "NoSuch (h)"), {"x": X}, "model b: ONNX Runtime cannot load it"),
    ],
)  # fmt: skip
def test_mistakes(b: str, data: dict[str, Any], text: str) -> None:
    with pytest.raises(CompressionError, match=text):
        compare(model(PLAIN, w=W, v=V), model(b, w=W, v=V), data)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_what_onnxruntime_quantizes(form: str, tmp_path: Path) -> None:
    """Every value of a small CNN that its quantizer keeps is found, and each is what the integers say."""
    from onnxruntime import quantization as ort

    text = """g (float[n, 2, 8, 8] x) => (float[n, 5] y) <float[4, 2, 3, 3] w, float[4] b, float[36, 5] v, float[5] c,
    int64[2] s = {0, -1}> { k = Conv (x, w, b) r = Relu (k) m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    f = Reshape (m, s) y = Gemm (f, v, c) }"""
    shapes = {"w": (4, 2, 3, 3), "b": (4,), "v": (36, 5), "c": (5,)}
    plain = model(text, **{name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
    plain.save(tmp_path / "a.onnx")
    x = RNG.standard_normal((32, 2, 8, 8)).astype(np.float32)

    class Reader(ort.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter([{"x": x}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    ort.quantize_static(
        tmp_path / "a.onnx", tmp_path / "b.onnx", Reader(), quant_format=ort.QuantFormat[form], per_channel=True
    )
    from archipel.compression.stored import read_stored

    result = compare(plain, read_stored(tmp_path / "b.onnx"), x)
    assert result.unmatched == ("k",)
    assert {r.name for r in result.rows} == {"y", "r", "m", "f"}
    # Rounding to steps of range / 255 has a noise of step^2 / 12; layers add theirs.
    assert all(25 < (r.snr_db or 0) < 60 for r in result.rows)
