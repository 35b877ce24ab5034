"""Marks for gradients in PyTorch: the same gradients as autodiff's, one by one and under torch.func."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from gradient_cases.reference import evaluator

from archipel import Model, autodiff
from archipel.training.cloud import TorchModule

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (double[n, 3] x) => (double loss) <double[3, 2] w = {0.7, -1.2, 0.4, 0.9, 1.1, -0.3}> {
    h = MatMul (x, w)  r = Round (h)  q = Mul (r, h)  y = Tanh (q)  yy = Mul (y, h)
    loss = ReduceSum <keepdims = 0> (yy)
}"""
X = np.array([[0.3, -1.4, 0.8], [1.7, 0.2, -0.6]])

MARKED: dict[str, Callable[[Model], Model]] = {
    "stop": lambda m: autodiff.stop_gradient(m, ["q"]),
    "straight through": lambda m: autodiff.straight_through(m, ["r"]),
    "clip by value": lambda m: autodiff.clip_gradient(m, ["h"], 0.625),
    "clip by norm": lambda m: autodiff.clip_gradient(m, ["h"], 0.625, by="norm"),
    "within the limit": lambda m: autodiff.clip_gradient(m, ["h"], 60.0, by="norm"),
}


def make(mark: Callable[[Model], Model]) -> Model:
    return mark(Model.from_proto(onnx.parser.parse_model(TEXT)))


@pytest.mark.parametrize("mark", MARKED.values(), ids=MARKED)
def test_gradients(mark: Callable[[Model], Model]) -> None:
    model = make(mark)
    feed = {"x": X, "loss.cotangent": np.array(1.0)}
    theirs = evaluator(autodiff.vjp(model, of=["loss"], wrt=["x", "w"]).to_bytes()).run(["x.grad", "w.grad"], feed)
    plain = evaluator(autodiff.vjp(make(lambda m: m), of=["loss"], wrt=["x"]).to_bytes()).run(["x.grad"], feed)

    module = TorchModule(model)
    x = torch.from_numpy(X).requires_grad_()
    loss = module(x)
    ours = torch.autograd.grad(loss, [x, module.get_parameter("w")])
    for mine, other in zip(ours, theirs):
        np.testing.assert_allclose(mine.numpy(), other, rtol=1e-9, atol=1e-12)
    # The mark is what makes the difference, where it limits anything.
    assert mark is MARKED["within the limit"] or not np.allclose(theirs[0], plain[0])


def test_straight_through_for_each_example() -> None:
    module = TorchModule(make(MARKED["straight through"]))
    weights = {"w": module.get_parameter("w")}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, weights, (x[None],))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.from_numpy(X))["w"]
    for row, found in zip(X, each):
        (expected,) = torch.autograd.grad(module(torch.from_numpy(row[None])), [weights["w"]])
        torch.testing.assert_close(found, expected)
