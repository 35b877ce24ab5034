"""Valid ONNX that devices cannot run: every command that takes a model handles it, or says in one line why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

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


MODELS: dict[Callable[[Path], None], dict[str, str]] = {
    # What each command says; a command that is not there takes the model.
    text: dict.fromkeys(("convert", "compress", "compare"), "input 'words' is text (strings)"),
    sequence: {"convert": "input 'parts' is not a tensor but sequence_type",
               "compress": "input 'parts' is not a tensor but sequence_type",
               "compare": "input 'parts' is Sequence(Tensor(FLOAT)), no tensor of real numbers"},
    complex_numbers: dict.fromkeys(("convert", "compress", "compare"), "input 'z' is COMPLEX64, no tensor of real"),
    growing_loop: dict.fromkeys(COMMANDS, NO_SHAPE),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda make: make.__name__)
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
            assert lines[0].startswith(f"archipel: {path}: {expected}"), err
