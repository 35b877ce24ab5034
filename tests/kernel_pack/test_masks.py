"""The gradients of Relu and Clip in the pack against PyTorch, and against the functions' bodies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch

from archipel.autodiff import differentiate
from archipel.graph.build import Builder
from archipel.graph.outline import Functions
from archipel.lite_runtime.engines.kernels import KernelPack
from tests.support.kernel_pack import open_session

ACTIVATIONS: dict[str, tuple[Callable[[Builder, ir.Value], ir.Value], Callable[[torch.Tensor], torch.Tensor]]] = {
    "Relu": (lambda op, x: op.Relu(x), torch.relu),
    "Clip": (lambda op, x: op.Clip(x, -0.5, 1.0), lambda x: torch.clamp(x, -0.5, 1.0)),
}


@pytest.mark.parametrize("shape", [(3, 5), (2, 40_009)], ids=["few", "many"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_pytorchs(name: str, shape: tuple[int, ...], pack: KernelPack) -> None:
    ours, theirs = ACTIVATIONS[name]
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": 21})
    op = Builder(graph)
    x, g = (op.input(each, ir.DataType.FLOAT, shape) for each in "xg")
    y = ours(op, x)
    op.outlined = functions = Functions()
    op.name_output(differentiate(op, {y: g}, [x])[0], "dx")
    model = ir.Model(graph, ir_version=10)
    functions.define(model)
    rng = np.random.default_rng(0)
    feed = {each: rng.standard_normal(shape).astype(np.float32) for each in "xg"}
    feed["x"].flat[:3] = 0.0, -0.5, 1.0  # the kinks
    tensor = torch.from_numpy(feed["x"]).requires_grad_()
    theirs(tensor).backward(torch.from_numpy(feed["g"]))
    for each in (pack, None):
        (found,) = open_session(ir.to_proto(model).SerializeToString(), each).run(["dx"], feed)
        np.testing.assert_array_equal(found, tensor.grad.numpy(), err_msg=str(each))
