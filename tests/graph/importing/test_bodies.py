"""Import of If, Loop and Scan: bodies with weights, captured values, and names and outputs used twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from archipel import Model
from archipel.errors import ModelImportError
from archipel.graph import check_model

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
RNG = np.random.default_rng(0)

# The weight of each branch is in the branch: as a Constant, and as an initializer.
BRANCHES = """g (float[n, 4] x, int64 rate) => (float[n, 3] y) <int64 fast = {16000}> {
    c = Equal (rate, fast)
    h = Neg (x)
    y = If (c) <then_branch = t () => (float[n, 3] a) {
        w = Constant <value = float[4, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> ()
        a = MatMul (h, w)
    }, else_branch = e () => (float[n, 3] a) { d = MatMul (x, w) a = Relu (d) }>
}"""


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def branches() -> onnx.ModelProto:
    proto = parsed(BRANCHES)
    other = next(a.g for a in proto.graph.node[2].attribute if a.name == "else_branch")
    other.initializer.append(numpy_helper.from_array(RNG.standard_normal((4, 3)).astype(np.float32), "w"))
    return proto


def saved(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def run(data: bytes, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feed)


def test_weights_of_branches_are_parameters_of_the_model(tmp_path: Path) -> None:
    proto = branches()
    model = Model.from_onnx(saved(tmp_path, proto))
    check_model(model.ir)
    weights = sorted(model.parameters.values(), key=lambda array: float(array[0, 0]))
    assert set(model.parameter_names) == {"w", "w_2"}
    np.testing.assert_array_equal(weights[-1], np.arange(1, 13, dtype=np.float32).reshape(4, 3))
    assert not any(body.initializers for body in model.ir.graph.subgraphs())
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    for rate in (16000, 8000):
        feed = {"x": x, "rate": np.array(rate)}
        np.testing.assert_array_equal(run(model.to_bytes(), feed)[0], run(proto.SerializeToString(), feed)[0])


def test_both_branches_are_compared_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate that a condition compares with is among the sample inputs: else a wrong branch would not be seen."""
    from archipel.graph.importing.samples import KINDS, sample

    model = Model.from_onnx(saved(tmp_path, branches()))
    rates = {int(sample(model.ir, kind, {"n": 2})["rate"]) for kind in KINDS}
    assert 16000 in rates
    assert len(rates) > 1


def test_a_body_may_return_its_inputs_and_a_value_twice(tmp_path: Path) -> None:
    proto = parsed("""g (float[n, 2] x) => (float[n, 2] y, float[n, 2] z, float[k, n, 2] w) <int64 k = {3}> {
        y, z, w = Loop (k, , x, x) <body = b (int64 i, bool c, float[n, 2] p, float[n, 2] q)
            => (bool c, float[n, 2] r, float[n, 2] r, float[n, 2] p) { r = Add (p, x) }>
    }""")
    model = Model.from_onnx(saved(tmp_path, proto))
    for body in model.ir.graph.subgraphs():
        assert len(set(body.outputs)) == len(body.outputs)
        assert all(value.producer() is not None for value in body.outputs)
    x = RNG.standard_normal((3, 2)).astype(np.float32)
    for found, expected in zip(
        run(model.to_bytes(), {"x": x}), (4 * x, 4 * x, np.stack([x, 2 * x, 3 * x])), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_weight_that_is_an_input_as_well_keeps_its_name(tmp_path: Path) -> None:
    """As old exporters have it: the model's names stay, although bodies give every value a name of its own."""
    proto = parsed("""g (float[2, 2] x, float[2, 2] w, bool c) => (float[2, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
        y = If (c) <then_branch = t () => (float[2, 2] a) { a = MatMul (x, w) },
            else_branch = e () => (float[2, 2] a) { a = Neg (x) }>
    }""")
    assert Model.from_onnx(saved(tmp_path, proto)).parameter_names == ("w",)


def test_the_batch_of_a_state_is_found_by_running_the_source(tmp_path: Path) -> None:
    """The file names no size of the state, whose batch is the second axis."""
    proto = parsed("""g (float[n, 6, 3] x, float[1, m, 4] state) => (float[p, q, r, s] y) {
        t = Transpose <perm = [1, 0, 2]> (x)
        y = LSTM <hidden_size = 4> (t, w, r, , , state)
    }""")
    for axis in (0, 1, 2):
        proto.graph.input[1].type.tensor_type.shape.dim[axis].ClearField("dim_param")
    for name, shape in (("w", (1, 16, 3)), ("r", (1, 16, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name))
    model = Model.from_onnx(saved(tmp_path, proto))
    assert [port.shape for port in model.inputs] == [("n", 6, 3), (1, "n", 4)]
    assert model.import_report is not None
    assert model.import_report.notes == ("axis 1 of 'state' is the batch: the source takes no other size there",)


# The carried value is called a scalar in the body, and has one axis: so does what the If gives.
SCALARS = """g (float[n, 2] x) => (float[n, 2] y) <int64 k = {3}> {
    one = Constant <value = bool[1] {1}> ()
    last, y = Loop (k, , one, x) <body = b (int64 i, bool c, bool s, float[n, 2] p)
        => (bool c, bool t, float[n, 2] q) {
        flag = Squeeze (s)
        t = If (flag) <then_branch = yes () => (bool u) { u = Or (s, one) },
            else_branch = no () => (bool v) { v = And (s, one) }>
        q = Add (p, p)
    }>
}"""


def test_scalars_that_a_body_declares_wrongly(tmp_path: Path) -> None:
    proto = parsed(SCALARS)
    model = Model.from_onnx(saved(tmp_path, proto))
    x = RNG.standard_normal((3, 2)).astype(np.float32)
    np.testing.assert_array_equal(run(model.to_bytes(), {"x": x})[0], 8 * x)
    shapes = {value.name: value.shape for body in model.ir.graph.subgraphs() for value in body.inputs}
    assert shapes["s"] == (1,)


def test_other_contradictions_are_refused(tmp_path: Path) -> None:
    proto = parsed(SCALARS.replace("float[n, 2] p)", "float[n, 3] p)"))
    with pytest.raises(ModelImportError, match="ShapeInferenceError"):
        Model.from_onnx(saved(tmp_path, proto))
