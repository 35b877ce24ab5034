"""Malformed and hostile files: a clear error that names file and reason, in bounded memory and time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from archipel import Model
from archipel.errors import ModelImportError
from archipel.graph.functions import MAX_NODES

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[batch, 2] x) => (float[batch, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }"""


def external(location: str, **more: object) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT)
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return proto


def write(folder: Path, proto: onnx.ModelProto) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


def _absolute(root: Path) -> str:
    (root / "w.bin").write_bytes(b"\0" * 24)
    return str(root / "w.bin")


def _above(root: Path) -> str:
    (root / "w.bin").write_bytes(b"\0" * 24)
    return "../w.bin"


def _link(root: Path) -> str:
    (root / "w.bin").write_bytes(b"\0" * 24)
    (root / "inner" / "w.bin").symlink_to(root / "w.bin")
    return "w.bin"


def _linked_folder(root: Path) -> str:
    (root / "other").mkdir()
    (root / "other" / "w.bin").write_bytes(b"\0" * 24)
    (root / "inner" / "data").symlink_to(root / "other")
    return "data/w.bin"


def _folder(root: Path) -> str:
    (root / "inner" / "w.bin").mkdir()
    return "w.bin"


def _pipe(root: Path) -> str:
    os.mkfifo(root / "inner" / "w.bin")
    return "w.bin"


def _circle(root: Path) -> str:
    (root / "inner" / "w.bin").symlink_to("w.bin")
    return "w.bin"


def _short(root: Path) -> str:
    (root / "inner" / "w.bin").write_bytes(b"\0" * 23)
    return "w.bin"


OUTSIDE = {
    "absolute": (_absolute, "is not a path inside the model's folder"),
    "above": (_above, "is not a path inside the model's folder"),
    "link": (_link, "is a symbolic link out of the model's folder; copy the file"),
    "linked folder": (_linked_folder, "is a symbolic link out of the model's folder"),
    "folder": (_folder, "is no plain file"),
    "pipe": (_pipe, "is no plain file"),
    "circle": (_circle, "external data of 'w'"),
    "absent": (lambda root: "w.bin", "does not exist; it belongs beside the model"),
    "nothing": (lambda root: "", "is not a path inside"),
    "short": (_short, "bytes 0 to 24 of 'w.bin' are needed, it has 23"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_external_data_that_must_not_be_read(case: str, tmp_path: Path) -> None:
    make, message = OUTSIDE[case]
    (tmp_path / "inner").mkdir()
    path = write(tmp_path / "inner", external(make(tmp_path), length=24))
    with pytest.raises(ModelImportError, match=message) as caught:
        Model.from_onnx(path)
    assert str(caught.value).startswith(str(path))
    assert "'w'" in str(caught.value)


def test_external_data_in_a_folder_below_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0" * 8 + np.arange(6, dtype="<f4").tobytes())
    path = write(tmp_path, external("data/w.bin", offset=8, length=24))
    assert Model.from_onnx(path).parameters["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_constant_hidden_in_a_branch_is_checked_too(tmp_path: Path) -> None:
    tensor = external("/etc/hostname", length=4).graph.initializer[0]
    constant = helper.make_node("Constant", [], ["c"], value=tensor)
    branch = helper.make_graph([constant], "b", [], [helper.make_tensor_value_info("c", 1, [2, 3])])
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.node.append(helper.make_node("If", ["f"], ["z"], then_branch=branch, else_branch=branch))
    with pytest.raises(ModelImportError, match="'/etc/hostname' is not a path inside"):
        Model.from_onnx(write(tmp_path, proto))


def test_a_model_in_memory_has_no_external_data() -> None:
    with pytest.raises(ModelImportError, match=r"'w' has external data.*Model\.from_onnx"):
        Model.from_proto(external("w.bin", length=24))


def test_more_than_a_protobuf_holds_is_refused_unread(tmp_path: Path) -> None:
    """Files without content on the disk, so that reading them would be the only cost."""
    with (tmp_path / "big.onnx").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(ModelImportError, match=r"big.onnx: has 2147483648 bytes; a protobuf has at most 2147483647"):
        Model.from_onnx(tmp_path / "big.onnx")
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(ModelImportError, match="more than 2147483647 bytes with its external data"):
        Model.from_onnx(write(tmp_path, external("w.bin")))


def calls(depth: int, width: int, last: str = "Neg") -> onnx.ModelProto:
    """Function i calls function i+1 `width` times: width**depth nodes in the end."""
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    functions = []
    for i in range(depth):
        op, domain = (last, "f" if last.startswith("f") else "") if i == depth - 1 else (f"f{i + 1}", "f")
        values = ["a", *(f"v{j}" for j in range(1, width)), "b"]
        nodes = [helper.make_node(op, [values[j]], [values[j + 1]], domain=domain) for j in range(width)]
        functions.append(helper.make_function("f", f"f{i}", ["a"], ["b"], nodes, imports))
    graph = helper.make_graph(
        [helper.make_node("f0", ["x"], ["y"], domain="f")],
        "bomb",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)


def test_nested_functions_are_counted_before_they_are_inlined(tmp_path: Path) -> None:
    assert MAX_NODES < 10**9
    started = time.monotonic()
    with pytest.raises(ModelImportError, match="has 1000000000 nodes with its functions inlined"):
        Model.from_onnx(write(tmp_path, calls(9, 10)))
    assert time.monotonic() - started < 5
    model = Model.from_onnx(write(tmp_path, calls(3, 4)))
    assert len(model.ir.graph) == 4**3
    with pytest.raises(ModelImportError, match="functions call functions more than 64 deep"):
        Model.from_onnx(write(tmp_path, calls(70, 1)))
    with pytest.raises(ModelImportError, match=r"the function f\.f\d calls itself"):
        Model.from_onnx(write(tmp_path, calls(3, 2, last="f0")))


def _shape_bomb() -> onnx.ModelProto:
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[1] x) => (float[a, b] y) <int64[2] huge = {300000, 300000}> {
        z = ConstantOfShape (huge)  e = Expand (z, huge)  t = Exp (e)  y = Add (t, x)
    }""")
    return proto


def _loop_bomb() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[4] x) => (float[4] y) <int64 n = {1152921504606846976}, bool c = {1}> {
        y = Loop (n, c, x) <body = b (int64 i, bool cc, float[4] v) => (bool co, float[4] w) {
            co = Identity (cc)  w = Add (v, v) }>
    }""")


def _input_bomb() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[1000000, 1000000] x) => (float[1000000, 1000000] y) { y = Neg (x) }""")


BOMBS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "harmless": (lambda: onnx.parser.parse_model(TEXT), "()"),  # first: what any import takes
    "shape": (_shape_bomb, "not compared with its source: ONNX Runtime does not run it"),
    "loop": (_loop_bomb, "not compared with its source: ONNX Runtime does not run it"),
    "input": (_input_bomb, "not compared with its source: its inputs have 4000000000000 bytes"),
}

CHILD = """
import resource, sys
import archipel.graph.importing.comparison as comparison
from archipel import Model
comparison.MAX_SECONDS = 1.0
for path in sys.argv[1:]:
    print(Model.from_onnx(path).import_report.notes)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.sampled(every=4)
def test_small_files_that_ask_for_much(tmp_path: Path) -> None:
    """Memory of a child process; what cannot be compared within the bounds is said to be so."""
    paths = [str(write(tmp_path / case, make())) for case, (make, _) in BOMBS.items()]
    done = subprocess.run([sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    kilobytes = list(map(int, lines[1::2]))
    for notes, (_, message), used in zip(lines[::2], BOMBS.values(), kilobytes, strict=True):
        assert message in notes
        assert used - kilobytes[0] < 100_000


def test_sparse_weights_are_refused() -> None:
    proto = onnx.parser.parse_model(TEXT)
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    proto.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64)), [5])
    )
    with pytest.raises(ModelImportError, match="the weight 's' is sparse; export it as a dense tensor"):
        Model.from_proto(proto)
