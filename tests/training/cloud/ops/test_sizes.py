"""Sizes that are computed beside the tensors, against the operators' definitions in onnx.reference."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
import torch
from gradient_cases.reference import evaluator

from archipel import Model
from archipel.training.cloud.graphs.torch_module import TorchModule


def compare(text: str, *shape: int) -> None:
    names = ", ".join("abcde"[: len(shape)])
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> agraph (float[{names}] x) => (int64[n] y) {{ {text} }}'
    )
    x = np.zeros(shape, np.float32)
    (expected,) = evaluator(proto).run(None, {"x": x})
    found = TorchModule(Model.from_proto(proto))(torch.from_numpy(x))
    assert (found.dtype, found.tolist()) == (torch.int64, expected.tolist()), text


@pytest.mark.parametrize("step", [1, 2, -1, -2])
def test_slices_of_shapes(step: int) -> None:
    for start, end in itertools.product([-9, -2, 0, 2, 9], repeat=2):
        compare(
            f"""s = Shape (x) b = Constant <value = int64[1] {{{start}}}> ()
            e = Constant <value = int64[1] {{{end}}}> ()
            axis = Constant <value = int64[1] {{0}}> () step = Constant <value = int64[1] {{{step}}}> ()
            y = Slice (s, b, e, axis, step)""",
            2, 3, 4,
        )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "s = Shape (x) t = Constant <value = int64[3] {-2, 3, -4}> () y = Div (s, t)",
        "s = Shape <start = 1> (x) t = Size (x) y = Sub (s, t)",
        "s = Shape (x) i = Constant <value = int64[2] {-1, 0}> () g = Gather (s, i) y = Concat <axis = 0> (g, s)",
        "s = Shape (x) m = ReduceProd <keepdims = 1> (s) y = Max (m, s)",
        """s = Shape (x) t = Constant <value = int64[3] {3, 3, 3}> () l = Less (s, t) y = Where (l, s, t)""",
    ],
)
def test_arithmetic_of_shapes(text: str) -> None:
    compare(text, 2, 3, 4)
