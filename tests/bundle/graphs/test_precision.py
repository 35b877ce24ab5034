"""The precision of a graph, told from its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from archipel.bundle.graphs.precision import graph_precision
from archipel.compression import DynamicInt8, Float16, StaticInt8, WeightOnly, compress
from archipel.graph import Model

NETWORK = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 64] x) => (float[n, 8] y) <float[64, 64] w,
float[64, 8] v> { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"""
RNG = np.random.default_rng(0)
X = RNG.standard_normal((32, 64)).astype(np.float32)


def _model() -> Model:
    proto = parser.parse_model(NETWORK)
    for name, shape in (("w", (64, 64)), ("v", (64, 8))):
        proto.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name))
    return Model.from_proto(proto)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (StaticInt8(), "int8"),
        (DynamicInt8(), "int8"),
        (WeightOnly(bits=8), "integer weights"),
        (WeightOnly(bits=4), "integer weights"),
        (Float16(), "float16"),
        (None, "float32"),
    ],
)
@pytest.mark.sampled(every=6)
def test_precision(part: Any, expected: str) -> None:
    model = _model() if part is None else compress(_model(), [part], calibration=X)[0].deployed()
    assert graph_precision(model.to_bytes()) == expected
