"""Where constants of a loop's body lie in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from archipel import Model
from archipel.graph.bodies import lower_initializers
from archipel.graph.walk import proto_bodies

TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
nested (float[2, 3] x, bool[3] c) => (float[2, 3] y, float[2, 3] z)
    <float own = {2.0}, float deep = {3.0}, float shared = {0.5}, float low = {7.0}, float both = {-1.0}> {
    first, second = Scan <num_scan_inputs = 1, body = step (float[3] h, float[3] row) => (float[3] next, float[3] out) {
        a = Mul (h, own)
        b = Add (a, row)
        sum = ReduceSum <keepdims = 0> (b)
        positive = Greater (sum, shared)
        next = If (positive) <
            then_branch = up () => (float[3] u) { t = Mul (b, deep)  u = Add (t, both) },
            else_branch = down () => (float[3] d) { t2 = Sub (b, low)  d = Mul (t2, both) }
        >
        out = Identity (next)
    }> (start, x)
    y = Add (second, shared)
    z = Identity (y)
}
"""


def nested() -> Model:
    proto = onnx.parser.parse_model(TEXT.replace("float[2, 3] x, bool[3] c", "float[2, 3] x, float[3] start"))
    return Model.from_proto(proto)


def constants(graph: onnx.GraphProto) -> list[set[str]]:
    """The names of the constants of a graph and, after it, of each of its bodies."""
    found = [{tensor.name for tensor in graph.initializer}]
    for node in graph.node:
        for body in proto_bodies(node):
            found.extend(constants(body))
    return found


def test_each_constant_lies_in_the_body_that_alone_reads_it() -> None:
    model = nested()
    assert constants(onnx.load_from_string(model.to_bytes()).graph) == [{"shared"}, {"own", "both"}, {"deep"}, {"low"}]
    # The model itself keeps them where passes and transformations look for them, and so does one that is read again.
    for held in (model, Model.from_proto(onnx.load_from_string(model.to_bytes()))):
        assert set(held.ir.graph.initializers) == {"own", "deep", "shared", "low", "both"}


def test_named_constants_stay() -> None:
    """Devices replace tensors of the main graph by name."""
    proto = ir.to_proto(nested().ir)
    lower_initializers(proto.graph, fixed={"own", "deep"})
    assert constants(proto.graph) == [{"shared", "own", "deep"}, {"both"}, set(), {"low"}]


@pytest.mark.parametrize("saved", [False, True])
def test_it_computes_the_same(saved: bool, tmp_path: Path) -> None:
    model = nested()
    source = tmp_path / "model.onnx"
    model.save(source)
    data = source.read_bytes() if saved else model.to_bytes()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    x, state = np.array([[1, 2, 3], [-40, 1, 2]], np.float32), np.array([1, 0, -1], np.float32)
    y, _ = session.run(None, {"x": x, "start": state})
    rows = []
    for row in x:
        state = 2 * state + row
        state = state * 3 - 1 if state.sum() > 0.5 else 7 - state
        rows.append(state + 0.5)
    np.testing.assert_array_equal(y, np.array(rows))
