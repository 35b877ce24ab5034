"""Compression of models with branches: layers outside are compressed, those inside are left and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from archipel import Model
from archipel.compression import (
    DynamicInt8,
    Float16,
    LowRank,
    PruneChannels,
    PruneWeights,
    StaticInt8,
    WeightOnly,
    compress,
)
from archipel.compression.part import Part
from archipel.errors import CompressionError
from tests.support.in_bodies import FLAG, in_branch

TEXT = """<ir_version: 10, opset_import: ["" : 21]> net (float[b, 1, 12, 12] x) => (float[b, 4] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)  r = Relu (c)  m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    t = Transpose <perm = [0, 1, 3, 2]> (m)  d = Conv <pads = [1, 1, 1, 1]> (t, w2, b2)  s = Relu (d)
    f = Flatten (s)  h = Gemm (f, w3, b3)  k = Relu (h)  y = Gemm (k, w4, b4)
}"""
SHAPES = {
    "w1": (8, 1, 3, 3),
    "b1": (8,),
    "w2": (8, 8, 3, 3),
    "b2": (8,),
    "w3": (288, 16),
    "b3": (16,),
    "w4": (16, 4),
    "b4": (4,),
}
X = np.random.default_rng(1).standard_normal((16, 1, 12, 12)).astype(np.float32)
LABELS = np.arange(16) % 4


def network(start: int) -> Model:
    """The nodes from `start` on in both branches of an If that asks whether a picture is bright anywhere."""
    proto, rng = onnx.parser.parse_model(TEXT), np.random.default_rng(0)
    for name, shape in SHAPES.items():
        proto.graph.initializer.append(
            numpy_helper.from_array((0.3 * rng.standard_normal(shape)).astype(np.float32), name)
        )
    proto = in_branch(proto, start)
    proto.graph.input.pop()
    proto.graph.node.insert(0, helper.make_node("Cast", ["brightest"], [FLAG], to=onnx.TensorProto.BOOL))
    proto.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["brightest"], keepdims=0))
    return Model.from_proto(proto, parameters=SHAPES)


def run(model: Model) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.to_bytes(), options).run(None, {"x": X})[0]


@pytest.mark.parametrize(
    ("start", "part", "left"),
    [
        # With all optimizations: ONNX Runtime 1.31 ended the process where a body reads what MaxPool, Reshape or
        # Transpose make of rounded numbers.
        (3, StaticInt8(), ["w2", "w3", "w4"]),
        (4, StaticInt8(), ["w2", "w3", "w4"]),
        (4, StaticInt8(activations="int8"), ["w2", "w3", "w4"]),
        (7, StaticInt8(), ["w3", "w4"]),
        (8, DynamicInt8(), ["w4"]),
        (6, WeightOnly(), ["w3", "w4"]),
        (6, PruneChannels(0.5), ["w3", "w4"]),
        (8, LowRank(energy=0.5), ["w4"]),
        (0, PruneWeights(0.5), []),
        (3, Float16(), []),
    ],
    ids=lambda value: str(value)[:22],
)
@pytest.mark.sampled(every=6)
def test_layers_outside_are_compressed_and_those_inside_named(start: int, part: Part, left: list[str]) -> None:
    model = network(start)
    small, report = compress(model, [part], (X, LABELS), calibration=X)
    # Where one small layer is rounded, its scales take more than its weights give back.
    assert start in (3, 4) or report.after.zipped < report.before.zipped
    assert report.steps[0].facts.get("left in loops and branches", []) == left
    deployed = small.deployed()
    # The float form and what devices run agree, as they do without branches.
    found, expected = run(deployed), run(small)
    noise = float(np.square(found - expected).mean() / np.square(expected).mean())
    assert noise < 0.05
    if not isinstance(part, PruneChannels | LowRank | PruneWeights):
        assert np.square(found - run(model)).mean() < 0.05 * np.square(run(model)).mean()


@pytest.mark.parametrize("part", [StaticInt8, lambda: PruneChannels(0.5), DynamicInt8])
def test_a_model_with_all_layers_inside_is_refused_with_their_names(part: Callable[[], Part]) -> None:
    with pytest.raises(CompressionError, match="outside of loops and branches; inside are w1, w2, w3, w4"):
        compress(network(0), [part()], (X, LABELS), calibration=X)
