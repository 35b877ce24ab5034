"""Files as they are: nothing upgraded, nothing believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from archipel.compression.stored import fix_inputs, read_stored
from archipel.errors import ModelImportError

HALF = """<ir_version: 4, opset_import: ["": 9, "com.example": 1]>
g (float16[n, 2] x, float16[2, 3] w) => (float16[n, 3] y) <float16[2, 3] w = {1, 2, 3, 4, 5, 6}>
{ h = MatMul (x, w) z = com.example.Own (h) y = Cast <to = 10> (z) }"""


def write(path: Path, text: str, change: Callable[[onnx.ModelProto], None] | None = None) -> Path:
    proto = parser.parse_model(text)
    if change is not None:
        change(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def test_nothing_is_changed(tmp_path: Path) -> None:
    model = read_stored(write(tmp_path / "half.onnx", HALF))
    assert model.ir.graph.opset_imports == {"": 9, "com.example": 1}
    assert [(node.domain, node.op_type, node.name) for node in model.ir.graph] == [
        ("", "MatMul", "MatMul_0"), ("com.example", "Own", "Own_1"), ("", "Cast", "Cast_2")
    ]  # fmt: skip
    assert [(info.name, info.dtype) for info in model.inputs] == [("x", "float16")]
    assert model.parameters["w"].dtype == np.float16


def test_names_are_one_each(tmp_path: Path) -> None:
    def same(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            node.name = "Cast_2"

    names = [node.name for node in read_stored(write(tmp_path / "m.onnx", HALF, same)).ir.graph]
    assert len(set(names)) == 3
    assert names[0] == "Cast_2"


def test_an_input_becomes_a_constant(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x, float t) => (float[2] y) { y = Mul (x, t) }'
    model = read_stored(write(tmp_path / "m.onnx", text))
    fixed = fix_inputs(model, {"t": np.array(3, np.float32)})
    assert [info.name for info in fixed.inputs] == ["x"]
    assert [info.name for info in model.inputs] == ["x", "t"]
    import onnxruntime

    session = onnxruntime.InferenceSession(fixed.to_bytes(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": np.array([1, 2], np.float32)})[0], [3, 6])


def cyclic(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].input[0] = "y"


def outside(proto: onnx.ModelProto) -> None:
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.ClearField("int32_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")


def no_outputs(proto: onnx.ModelProto) -> None:
    del proto.graph.output[:]


@pytest.mark.parametrize("change", [cyclic, outside, no_outputs])
def test_what_is_no_model(change: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(12))
    (tmp_path / "folder").mkdir()
    path = write(tmp_path / "folder" / "bad.onnx", HALF, change)
    with pytest.raises(ModelImportError, match=r"bad\.onnx: "):
        read_stored(path)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", HALF)
    data = path.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.onnx").write_text("not a model")
    for name in ("cut", "text"):
        with pytest.raises(ModelImportError, match=rf"{name}\.onnx: not (a valid ONNX file|an ONNX model)"):
            read_stored(tmp_path / f"{name}.onnx")
    with pytest.raises(ModelImportError, match="No such file"):
        read_stored(tmp_path / "none.onnx")


def test_external_data_beside_the_file(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    proto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    np.testing.assert_array_equal(read_stored(tmp_path / "m.onnx").parameters["w"], weight)
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelImportError, match=r"m\.onnx|m\.data"):
        read_stored(tmp_path / "m.onnx")
