"""Where a function has no derivative: which of them `TorchModule` and `autodiff` give (the table in docs/cloud.md)."""

from __future__ import annotations

import onnx
import pytest
import torch

from archipel import Model, autodiff
from archipel.training.cloud.graphs.torch_module import TorchModule

# Operator, its other inputs, its input x, and the gradients: PyTorch's and archipel's rule's.
KINKS = {
    "MaxPool": ("MaxPool <kernel_shape = [2], strides = [2]> (x)", [1.0, 1.0], [1.0, 0.0], [0.5, 0.5]),
    "ReLU6": ("Clip (x, zero, six)", [0.0, 6.0], [0.0, 0.0], [1.0, 1.0]),
    "HardSigmoid": ("HardSigmoid (x)", [-2.5, 2.5], [0.2, 0.2], [0.0, 0.0]),
    # Where they agree
    "PRelu": ("PRelu (x, quarter)", [0.0, 0.0], [0.25, 0.25], [0.25, 0.25]),
    "Clip": ("Clip (x, zero, quarter)", [0.0, 0.25], [1.0, 1.0], [1.0, 1.0]),
    "Relu": ("Relu (x)", [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
    "Abs": ("Abs (x)", [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
    "Max": ("Max (x, quarter)", [0.25, 0.25], [0.5, 0.5], [0.5, 0.5]),
}


@pytest.mark.parametrize("name", KINKS)
def test_gradient_where_there_is_no_derivative(name: str) -> None:
    call, at, of_torch, of_rule = KINKS[name]
    constants = {"zero": 0.0, "six": 6.0, "quarter": 0.25}
    given = " ".join(f"{key} = Constant <value_float = {value}> ()" for key, value in constants.items() if key in call)
    text = (
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[1, 1, 2] x) => (float[1, 1, n] y) {{ {given} y = {call} }}'
    )
    model = Model.from_proto(onnx.parser.parse_model(text))
    x = torch.tensor(at).reshape(1, 1, 2).requires_grad_()
    y = TorchModule(model)(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found.flatten(), torch.tensor(of_torch))
    pulled = autodiff.vjp(model, of=["y"], wrt=["x"])
    values = {"x": x.detach(), "y.cotangent": torch.ones_like(y)}
    module = TorchModule(pulled)
    results = dict(zip([info.name for info in pulled.outputs], module(*(values[key] for key in module.input_names))))
    torch.testing.assert_close(results["x.grad"].flatten(), torch.tensor(of_rule))
