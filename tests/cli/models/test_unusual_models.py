"""Valid ONNX that devices cannot run: every command that takes a model handles it, or says in one line why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.commands import Command

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
COMMANDS = {
    "convert": ["{model}", "-o", "{here}/out.bundle", "--key", "{here}/key"],
    "inspect": ["{model}"],
    "compress": ["{model}", "-o", "{here}/out.onnx", "--calibration", "{here}/data.npz"],
    "compare": ["{model}", "{model}", "--data", "{here}/data.npz"],
}
NO_SHAPE = "output 'y' (of Loop 'twice') has no shape, and none can be inferred; write its shape into the file"


def save(path: Path, nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto],
         weights: dict[str, np.ndarray] | None = None) -> None:  # fmt: skip
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


def text(path: Path) -> None:
    words, same = (helper.make_tensor_value_info(name, TensorProto.STRING, ["n"]) for name in ("words", "same"))
    save(path, [helper.make_node("StringNormalizer", ["words"], ["same"])], [words], [same])


def sequence(path: Path) -> None:
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, ["n", 4])
    save(path, [helper.make_node("ConcatFromSequence", ["parts"], ["y"], axis=0)], [parts], [Y])


def complex_numbers(path: Path) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.COMPLEX64, ["n", 4]) for name in ("z", "same")]
    save(path, [helper.make_node("Identity", ["z"], ["same"])], ports[:1], ports[1:])


def growing_loop(path: Path) -> None:
    """Each iteration doubles its value, so no shape is that of all of them."""
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    goes, on = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("goes", "on"))
    v, w = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("v", "w"))
    inner = [helper.make_node("Identity", ["goes"], ["on"]), helper.make_node("Concat", ["v", "v"], ["w"], axis=1)]
    body = helper.make_graph(inner, "body", [count, goes, v], [on, w])
    save(
        path,
        [helper.make_node("Loop", ["three", "true", "x"], ["y"], body=body, name="twice")],
        [X],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        {"three": np.array(3), "true": np.array(True)},
    )


LINEAR = helper.make_node("MatMul", ["x", "w"], ["h"], name="linear")
WEIGHTS = {"w": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)}


def branches(path: Path) -> None:
    """What the If reads is computed by a layer that compression changes; a branch has a weight of its own."""
    then, other = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("a", "b"))
    yes = helper.make_graph([helper.make_node("MatMul", ["h", "v"], ["a"])], "yes", [], [then])
    no = helper.make_graph([helper.make_node("Neg", ["h"], ["b"])], "no", [], [other])
    nodes = [
        LINEAR,
        helper.make_node("ReduceSum", ["h"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=yes, else_branch=no),
    ]
    save(path, nodes, [X], [Y], {**WEIGHTS, "v": WEIGHTS["w"].T.copy(), "zero": np.zeros((), np.float32)})


def fixed_loop(path: Path) -> None:
    """y = 8 h, as three doublings."""
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    goes, on = (helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("goes", "on"))
    v, twice = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("v", "twice"))
    inner = [helper.make_node("Identity", ["goes"], ["on"]), helper.make_node("Add", ["v", "v"], ["twice"])]
    body = helper.make_graph(inner, "body", [count, goes, v], [on, twice])
    nodes = [LINEAR, helper.make_node("Loop", ["three", "true", "h"], ["y"], body=body)]
    save(path, nodes, [X], [Y], {**WEIGHTS, "three": np.array(3), "true": np.array(True)})


def damaged_weight(number: float) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        w = WEIGHTS["w"].copy()
        w[1, 2] = number
        save(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], [X], [Y], {"w": w})

    make.__name__ = f"weight_{number}"
    return make


def masked(path: Path) -> None:
    """Minus infinity that is added takes a class out: it is no damage."""
    mask = np.array([0, 0, 0, -np.inf], np.float32)
    save(path, [LINEAR, helper.make_node("Add", ["h", "mask"], ["y"])], [X], [Y], {**WEIGHTS, "mask": mask})


def unknown_attribute(path: Path) -> None:
    save(path, [helper.make_node("MatMul", ["x", "w"], ["y"], alfa=1.0)], [X], [Y], WEIGHTS)


def wrong_order(path: Path) -> None:
    save(path, [helper.make_node("Relu", ["z"], ["y"]), helper.make_node("Relu", ["x"], ["z"])], [X], [Y])


def wrong_shape(path: Path) -> None:
    save(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], [X], [Y], {"w": np.ones((5, 4), np.float32)})


def not_finite(number: str) -> dict[str, str]:
    return dict.fromkeys(
        ("convert", "compress"), f"weight 'w': 1 of 16 elements are not finite, the first at [1, 2] ({number})"
    )


MODELS: dict[Callable[[Path], None], dict[str, str]] = {
    # What each command says; a command that is not there takes the model.
    text: dict.fromkeys(("convert", "compress", "compare"), "input 'words' is text (strings)"),
    sequence: {"convert": "input 'parts' is not a tensor but sequence_type",
               "compress": "input 'parts' is not a tensor but sequence_type",
               "compare": "input 'parts' is Sequence(Tensor(FLOAT)), no tensor of real numbers"},
    complex_numbers: dict.fromkeys(("convert", "compress", "compare"), "input 'z' is COMPLEX64, no tensor of real"),
    growing_loop: dict.fromkeys(COMMANDS, NO_SHAPE),
    unknown_attribute: dict.fromkeys(COMMANDS, "not a valid ONNX "),
    wrong_order: dict.fromkeys(COMMANDS, "not a valid ONNX "),
    wrong_shape: {"convert": "not a valid ONNX model: ", "compress": "not a valid ONNX model: ",
                  "compare": "model a: ONNX Runtime cannot load it: Node ("},
    branches: {},
    fixed_loop: {},
    masked: {},
    damaged_weight(np.nan): not_finite("nan"),
    damaged_weight(np.inf): not_finite("inf"),
    damaged_weight(-np.inf): not_finite("-inf"),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda make: make.__name__)
@pytest.mark.sampled(every=6)
def test_a_command_takes_it_or_says_why_not(archipel: Command, tmp_path: Path, model: Callable[[Path], None]) -> None:
    path = tmp_path / "model.onnx"
    model(path)
    np.savez(tmp_path / "data.npz", x=np.ones((8, 4), np.float32))
    archipel("keys", str(tmp_path / "key"))
    for command, arguments in COMMANDS.items():
        expected = MODELS[model].get(command)
        call = [each.format(model=path, here=tmp_path) for each in arguments]
        _, err = archipel(command, *call, code=0 if expected is None else 1)
        if expected is not None:
            # compress says on a line before that it uses its own recipe.
            lines = [line for line in err.splitlines() if not line.startswith("no --recipe")]
            assert len(lines) == 1, err
            said = lines[0].removeprefix("archipel: ").removeprefix(f"{path} and {path} on {tmp_path / 'data.npz'}: ")
            assert said.removeprefix(f"{path}: ").startswith(expected), err


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("make", [branches, fixed_loop], ids=lambda make: make.__name__)
def test_compressed_control_flow_computes_what_it_did(
    archipel: Command, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    archipel("compress", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "small.onnx"), "--calibration",
             str(tmp_path / "x.npy"))  # fmt: skip
    small = onnx.load(tmp_path / "small.onnx")
    assert any(tensor.data_type == TensorProto.INT8 for tensor in small.graph.initializer)
    for batch in (x, -x, x[:3]):  # both branches run
        [expected], [found] = (
            ReferenceEvaluator(model).run(None, {"x": batch}) for model in (onnx.load(tmp_path / "model.onnx"), small)
        )
        assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
