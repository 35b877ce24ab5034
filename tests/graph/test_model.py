"""Model: reading, writing, copying, and the ways a file can be wrong."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from archipel import Model
from archipel.bundle.roles import Program
from archipel.errors import GraphError, ModelImportError
from archipel.graph import TensorInfo, check_model, promote
from archipel.graph.parameters import match

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "onnx_models"
HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
LINEAR = (
    HEADER
    + """
agraph (float[batch, 2] x) => (float[batch, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[3] b = {0, 0, 1}>
{ p = MatMul (x, w) y = Add (p, b) }
"""
)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def run(model: Model | str, **inputs: np.ndarray) -> list[np.ndarray]:
    source = model.to_bytes() if isinstance(model, Model) else model
    return onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, inputs)


@pytest.fixture
def linear(tmp_path: Path) -> Model:
    onnx.save(parse(LINEAR), tmp_path / "linear.onnx")
    return Model.from_onnx(tmp_path / "linear.onnx")


def test_ports_and_parameters(linear: Model) -> None:
    assert linear.inputs == (TensorInfo("x", "float32", ("batch", 2)),)
    assert linear.outputs == (TensorInfo("y", "float32", ("batch", 3)),)
    assert {name: value.tolist() for name, value in linear.parameters.items()} == {
        "w": [[1, 2, 3], [4, 5, 6]],
        "b": [0, 0, 1],
    }
    assert repr(linear) == "<Model (x: float32[batch, 2]) -> (y: float32[batch, 3]), 2 nodes>"


def test_a_model_that_is_no_program(linear: Model) -> None:
    assert (linear.kind, linear.steps) == (None, 1)
    with pytest.raises(GraphError, match=r"<Model \(x: .*> has no signature, so it is no program"):
        _ = linear.program
    linear.signature = Program(kind="train", inputs=(), outputs=(), steps=4)
    assert (linear.program, linear.kind, linear.steps) == (linear.signature, "train", 4)


def test_saved_file_is_plain_onnx(linear: Model, tmp_path: Path) -> None:
    path = tmp_path / "again.onnx"
    linear.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    assert run(str(path), x=np.ones((1, 2), np.float32))[0].tolist() == [[5, 7, 10]]
    again = Model.from_onnx(path)
    assert again.parameter_names == linear.parameter_names
    assert again.inputs == linear.inputs


def test_what_does_not_fit_into_one_file_is_saved_as_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.arange(40_000, dtype=np.float32).reshape(2, 20_000)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 20_000])], [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    model, path = Model.from_onnx(tmp_path / "m.onnx"), tmp_path / "two" / "again.onnx"
    path.parent.mkdir()
    monkeypatch.setattr("archipel.graph.model._EXTERNAL_DATA_FROM", w.nbytes)  # in place of 2 GiB
    for factor in (1, 2):  # also over files that are there
        model.ir.graph.initializers["w"].const_value = ir.tensor(w * factor)
        model.save(path)
        assert [each.name for each in sorted(path.parent.iterdir())] == ["again.onnx", "again.onnx.data"]
        assert run(str(path), x=np.ones((1, 2), np.float32))[0].tolist() == (w * factor).sum(0, keepdims=True).tolist()


def test_copy_is_independent(linear: Model) -> None:
    other = linear.copy()
    promote(other.ir, ["w"])
    assert [port.name for port in other.inputs] == ["x", "w"]
    assert [port.name for port in linear.inputs] == ["x"]
    assert set(other.parameters) == {"b"}
    check_model(other.ir)
    with pytest.raises(GraphError, match="'w' is not an initializer"):
        promote(other.ir, ["w"])


def test_globs() -> None:
    names = ["conv1.weight", "conv1.bias", "head.weight"]
    assert match(names, "*") == names
    assert match(names, "conv*") == names[:2]
    assert match(names, ["head.*", "*.bias"]) == ["conv1.bias", "head.weight"]
    with pytest.raises(GraphError, match=r"no parameter matches 'fc\*'; there are: conv1.weight"):
        match(names, ["fc*"])


def test_constants_and_settings_are_not_parameters() -> None:
    text = (
        HEADER
        + """
    agraph (float[1, 1, h, w] x) => (float[1, 1, a, c] y)
        <float[4] scales = {1, 1, 2, 2}, float low = {0}, float[1] slope = {0.1}>
    { r = Resize <mode = "nearest"> (x, , scales) m = Max (r, low) y = PRelu (m, slope) }
    """
    )
    assert Model.from_proto(parse(text)).parameter_names == ("slope",)


def test_an_older_opset_is_upgraded() -> None:
    # Until opset 12, the axes of ReduceSum and Squeeze were attributes.
    text = """<ir_version: 6, opset_import: ["" : 11]>
    agraph (float[n, 1, 3] x) => (float[n] y)
    { s = Squeeze <axes = [1]> (x) y = ReduceSum <axes = [1], keepdims = 0> (s) }
    """
    model = Model.from_proto(parse(text))
    assert model.ir.graph.opset_imports[""] == 21
    assert model.ir.ir_version == 10
    check_model(model.ir)
    assert run(model, x=np.ones((2, 1, 3), np.float32))[0].tolist() == [3, 3]


def test_weights_that_are_inputs_too_become_initializers_only() -> None:
    proto = parse(LINEAR)
    proto.ir_version = 3
    proto.opset_import[0].version = 9
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model = Model.from_proto(proto)
    assert [port.name for port in model.inputs] == ["x"]
    assert model.parameter_names == ("w", "b")


def test_local_functions_are_inlined() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    agraph (float[n] x) => (float[n] y) { y = local.twice (x) }
    <opset_import: ["" : 18], domain: "local"> twice (a) => (b) { b = Add (a, a) }
    """
    model = Model.from_proto(parse(text))
    assert [(node.domain, node.op_type) for node in model.ir.graph] == [("", "Add")]
    check_model(model.ir)


def test_unnamed_sizes_get_names() -> None:
    proto = parse(LINEAR)
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    model = Model.from_proto(proto)
    assert model.inputs[0].shape == ("x_dim0", 2)


def test_output_shapes_may_be_left_out() -> None:
    proto = parse(LINEAR)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    assert Model.from_proto(proto).outputs[0].shape == ("batch", 3)


def test_external_data_is_read(tmp_path: Path) -> None:
    proto = parse(LINEAR)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    external = {"save_as_external_data": True, "location": "m.bin", "size_threshold": 0}
    onnx.save(copy.deepcopy(proto), tmp_path / "m.onnx", **external)
    model = Model.from_onnx(tmp_path / "m.onnx")
    (tmp_path / "m.bin").unlink()
    assert model.parameters["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    onnx.save(proto, tmp_path / "m.onnx", **external)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ModelImportError, match=r"m.onnx: .*m.bin"):
        Model.from_onnx(tmp_path / "m.onnx")


def test_external_data_does_not_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 64)
    (tmp_path / "inner").mkdir()
    proto = parse(LINEAR)
    for tensor in proto.graph.initializer:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.ClearField("float_data")
        tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "inner" / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelImportError, match=r"external data of 'w': .*secret"):
        Model.from_onnx(tmp_path / "inner" / "m.onnx")


def _cyclic() -> onnx.ModelProto:
    proto = parse(LINEAR)
    proto.graph.node[0].input[0] = "y"
    return proto


def _sequence() -> onnx.ModelProto:
    proto = parse(LINEAR)
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2]))
    proto.graph.input.append(helper.make_value_info("parts", kind))
    return proto


def _shapeless() -> onnx.ModelProto:
    proto = parse(LINEAR)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


def _contradiction() -> onnx.ModelProto:
    proto = parse(LINEAR)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((5, 3), np.float32), "w"))
    return proto


WRONG = {
    "cyclic": (_cyclic, "not a valid ONNX model: .*topologically sorted"),
    "sequence": (_sequence, "input 'parts' is not a tensor but sequence_type"),
    "no shape": (_shapeless, "input 'x' has no shape; declare one"),
    "contradiction": (_contradiction, "not a valid ONNX model: .*ncompatible dimensions"),
    "no outputs": (lambda: onnx.ModelProto(ir_version=10), "the model has no graph outputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_models_are_refused(case: str, tmp_path: Path) -> None:
    make, message = WRONG[case]
    path = tmp_path / "wrong.onnx"
    path.write_bytes(make().SerializeToString())
    with pytest.raises(ModelImportError, match=f"wrong.onnx: {message}"):
        Model.from_onnx(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"nowhere.onnx does not exist"):
        Model.from_onnx(tmp_path / "nowhere.onnx")
    with pytest.raises(ModelImportError, match=r"a folder, and no bundle, since it has no manifest\.json"):
        Model.from_onnx(tmp_path)
    (tmp_path / "text.onnx").write_text("this is no protobuf")
    with pytest.raises(ModelImportError, match=r"text.onnx: not an ONNX file, or a damaged one"):
        Model.from_onnx(tmp_path / "text.onnx")


@pytest.mark.sampled(every=3)
def test_models_from_other_tools() -> None:
    if not DATA.is_dir():
        assert os.environ.get("CI") != "true", f"{DATA} is needed in CI"
        pytest.skip(f"{DATA} is absent")
    for path in sorted(DATA.glob("*.onnx")):
        model = Model.from_onnx(path)
        check_model(model.ir)
        with np.load(path.with_suffix("").with_suffix(".ref.npz")) as file:
            known = dict(file)
        assert model.parameters
        # Some were exported for one example at a time.
        first = {port.name: known[f"in:{port.name}"][:1] for port in model.inputs}
        for port, value in zip(model.outputs, run(model, **first), strict=True):
            np.testing.assert_allclose(value, known[f"out:{port.name}"][:1], rtol=1e-3, atol=1e-4)
