"""Names of parameters come from files: they must neither run as code nor hide what a module needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

from archipel.graph import Model
from archipel.training.cloud import TorchModule

NAMES = [
    "forward.weight", "train.weight", "graph.weight", "code", "source.w", "_constants.device", "_nodes.x", "a..b",
    "0.weight", "w/scale", "a.training", "_paths", ".", "x'y\\n", 'a\nb',
]  # fmt: skip


def renamed(name: str) -> Model:
    """x + w, where the parameter w has another name."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> {y = Add(x, w)}'
    )
    proto = parser.parse_model(text)
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = name
    return Model.from_proto(onnx.load_from_string(proto.SerializeToString()), parameters=[name])


@pytest.mark.parametrize("name", NAMES)
def test_any_name_computes_and_comes_back(name: str) -> None:
    module = TorchModule(renamed(name))
    assert module(torch.zeros(2)).tolist() == [1.0, 2.0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    assert {key: value.tolist() for key, value in module.to_model().parameters.items()} == {name: [2.0, 3.0]}


def test_a_name_that_is_code_is_not_run(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    # Beside its quotes it has no dot, which would begin a level of its own.
    name = f'x") + (open({str(seen)!r}, "w") and 0) + getattr(self, "x'
    module = TorchModule(renamed(name))
    assert module(torch.zeros(2)).tolist() == [1.0, 2.0]
    assert not seen.exists()


@pytest.mark.parametrize(
    "name", [*NAMES, "0_weight", "class", "self", "torch", "getattr", "a.b", "ª", "x=open('f')", ""]
)
def test_any_name_of_an_input(name: str) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] a_b, float[2] i) => (float[2] y) {y = Sub(a_b, i)}'
    proto = parser.parse_model(text)
    proto.graph.input[1].name = proto.graph.node[0].input[1] = name or "_"
    module = TorchModule(Model.from_proto(proto))
    assert module(torch.ones(2), torch.zeros(2)).tolist() == [1.0, 1.0]
    if name == "self":  # Python's own
        return
    assert module(**{"a_b": torch.ones(2), name or "_": torch.zeros(2)}).tolist() == [1.0, 1.0]


def test_two_names_that_would_be_one_path_stay_two() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[1] x) => (float[1] y)
        <float[1] v = {1}, float[1] w = {2}> {s = Add(x, v) y = Sub(s, w)}"""
    proto = parser.parse_model(text)
    for initializer, node, name in zip(proto.graph.initializer, proto.graph.node, ('a"', "a'")):
        initializer.name = node.input[1] = name
    model = Model.from_proto(proto, parameters=['a"', "a'"])
    module = TorchModule(model)
    assert module(torch.zeros(1)).tolist() == [-1.0]
    np.testing.assert_equal(module.to_model().parameters, {'a"': np.float32([1]), "a'": np.float32([2])})
