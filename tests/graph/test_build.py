"""Builder, checks and passes: what is emitted is named, shaped and valid."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.errors import GraphError
from archipel.graph import IMPORTERS, Builder, check_model
from archipel.graph.passes import remove_dead_code, share_subexpressions, simplify
from archipel.graph.shapes import constant_array, dims
from archipel.importer_registry import find_importer

EMPTY = """<ir_version: 10, opset_import: ["" : 21]>
agraph (double[n, 3] x, float[4] f) => (double[n, 3] y) { y = Identity (x) }"""


def blank(text: str = EMPTY) -> tuple[Model, Builder]:
    model = Model.from_proto(onnx.parser.parse_model(text))
    return model, Builder(model.ir.graph)


def test_values_are_typed_shaped_and_uniquely_named() -> None:
    model, op = blank()
    x, f = model.ir.graph.inputs
    with op.scope("part"):
        doubled = op.Mul(x, 2.0)
        again = op.Mul(x, 2.0)
        half, rest = op.emit("Split", f, outputs=2, num_outputs=2)
    assert (doubled.name, again.name) == ("part/Mul", "part/Mul_2")
    assert (doubled.dtype, dims(doubled)) == (ir.DataType.DOUBLE, ("n", 3))
    assert (dims(half), dims(rest)) == ((2,), (2,))
    # A Python number takes the type of the value beside it; equal constants are one.
    assert doubled.producer().inputs[1] is again.producer().inputs[1]
    assert constant_array(doubled.producer().inputs[1]).dtype == np.float64
    for i, value in enumerate((doubled, again, half, rest)):
        op.name_output(value, f"out{i}")
    check_model(model.ir)
    share_subexpressions(model.ir)
    assert [node.op_type for node in model.ir.graph].count("Mul") == 1
    assert [value.name for value in model.ir.graph.outputs] == ["y", "out0", "out1", "out2", "out3"]
    check_model(model.ir)


def test_dead_code_goes() -> None:
    model, op = blank()
    op.Exp(op.Mul(model.ir.graph.inputs[0], 2.0))
    remove_dead_code(model.ir)
    assert [node.op_type for node in model.ir.graph] == ["Identity"]
    assert not model.ir.graph.initializers


def test_shape_arithmetic_is_folded_and_parameters_are_kept() -> None:
    model, _ = blank("""<ir_version: 10, opset_import: ["" : 21]>
    agraph (float[batch, 2, 3] x) => (float[batch, 2] y) <float[2, 6] w = {1,1,1,1,1,1,1,1,1,1,1,1}> {
        batch = Shape <start = 0, end = 1> (x)  rest = Constant <value_ints = [6]> ()
        target = Concat <axis = 0> (batch, rest)  flat = Reshape (x, target)  t = Transpose (w)  y = MatMul (flat, t)
    }""")
    simplify(model.ir, keep=["w"])
    assert [node.op_type for node in model.ir.graph] == ["Reshape", "Transpose", "MatMul"]
    target = constant_array(model.ir.graph.node(0).inputs[1])
    assert target is not None
    assert target.tolist() == [-1, 6]
    assert set(model.parameters) == {"w"}


@settings(max_examples=40, derandomize=True, database=None)
@given(data=st.data())
@pytest.mark.sampled(every=4)
def test_sum_to_is_the_adjoint_of_broadcasting(data: st.DataObject) -> None:
    full = data.draw(st.lists(st.integers(1, 3), max_size=4))
    small = [data.draw(st.sampled_from([d, 1])) for d in full][data.draw(st.integers(0, len(full))) :]
    free = data.draw(st.booleans())
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="sums")
    op = Builder(graph)
    names = [[f"{side}{i}" if free else d for i, d in enumerate(shape)] for side, shape in (("a", full), ("b", small))]
    value = op.input("value", ir.DataType.DOUBLE, names[0])
    like = op.input("like", ir.DataType.DOUBLE, names[1])
    op.name_output(op.sum_to(value, like), "sum")
    model = Model(ir.Model(graph, ir_version=10))
    check_model(model.ir)
    array = np.random.default_rng(0).standard_normal(full)
    found = ReferenceEvaluator(model.to_bytes()).run(None, {"value": array, "like": np.zeros(small)})[0]
    axes = tuple(range(len(full) - len(small)))
    expected = array.sum(axes) if axes else array
    for axis, d in enumerate(small):
        if d == 1:
            expected = expected.sum(axis, keepdims=True)
    assert found.shape == tuple(small)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_wrong_use_is_named() -> None:
    model, op = blank()
    x, f = model.ir.graph.inputs
    with pytest.raises(GraphError, match=r"MatMul 'MatMul': .*ncompatible dimensions"):
        op.MatMul(x, f)
    with pytest.raises(GraphError, match="the shape of 'mystery' is not known"):
        dims(ir.Value(name="mystery"))


def test_check_names_the_node() -> None:
    text = EMPTY.replace('["" : 21]', '["" : 21, "custom" : 1]').replace("Identity", "custom.Copy")
    model, _ = blank(text)
    with pytest.raises(GraphError, match=r"Copy '.*' is of domain 'custom'; only standard operators"):
        check_model(model.ir)
    model, _ = blank()
    model.ir.graph.node(0).op_type = "Upsample"
    with pytest.raises(GraphError, match=r"Upsample '.*' is deprecated in opset 21"):
        check_model(model.ir)
    model.ir.graph.node(0).op_type = "Fly"
    with pytest.raises(GraphError, match=r"Fly '.*' does not exist in opset 21"):
        check_model(model.ir)
    model.ir.graph.node(0).op_type = "Concat"
    with pytest.raises(GraphError, match=r"not valid ONNX: .*axis"):
        check_model(model.ir)


def test_importers_resolve() -> None:
    for source in IMPORTERS:
        assert callable(find_importer(source))
    with pytest.raises(GraphError, match=r"no importer for 'caffe'; known: .*torch"):
        find_importer("caffe")


@pytest.mark.parametrize(
    "use", ["archipel.Model", "import archipel.graph", "import archipel.autodiff", "import archipel.training"]
)
@pytest.mark.parametrize("package", ["onnx", "onnx_ir"])
@pytest.mark.sampled(every=6)
def test_without_the_extra(use: str, package: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
import archipel
from archipel.errors import MissingExtraError
try:
    {use}
except MissingExtraError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == f"{package} is not installed; install it with: pip install 'archipel[convert]'\n"
