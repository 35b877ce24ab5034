"""Functions with gradient rules of users: `TorchModule` follows the rule, as autodiff does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from archipel import Model, autodiff
from archipel.autodiff import RULES
from archipel.graph.functions import KEPT
from archipel.training.cloud.graphs.torch_module import TorchModule

TEXT = """<ir_version: 10, opset_import: ["" : 21, "test.rules" : 1]>
agraph (double[n, 3] x) => (double s) <double[3] w = {0.5, -1.5, 2}> {
    a = Mul (x, w)  b = test.rules.Step (a)  c, kept = test.rules.Limit <most = 1.0> (b, x)
    f = Cast <to = 11> (kept)  d = Mul (c, c)  e = Mul (d, f)  s = ReduceSum <keepdims = 0> (e) }
<domain: "test.rules", opset_import: ["" : 21]>
Step (x) => (y) { y = Sign (x) }
<domain: "test.rules", opset_import: ["" : 21]>
Limit <most> (x, by) => (y, kept) {
    m = Constant <value_float : float = @most> ()  l = CastLike (m, by)
    size = Abs (by)  kept = Less (size, l)  y = Add (x, by) }"""


@pytest.fixture
def rules() -> Iterator[None]:
    @autodiff.rule("test.rules", "Step")
    def step(ctx):
        return [ctx.op.Mul(ctx.cotangent, ctx.outputs[0])]

    @autodiff.rule("test.rules", "Limit")
    def limit(ctx):
        return [ctx.cotangent, ctx.op.Mul(ctx.cotangent, 3.0)]

    yield
    for name in ("Step", "Limit"):
        del RULES["test.rules", name]
        KEPT.discard(("test.rules", name))


@pytest.mark.usefixtures("rules")
def test_gradients_follow_the_rule() -> None:
    model = Model.from_proto(onnx.parser.parse_model(TEXT))
    x = np.array([[0.25, -1.5, 0.75], [-0.5, 0.125, 2.0]])
    gradient = ReferenceEvaluator(autodiff.gradient(model, of="s", wrt=["x", "w"]).to_bytes())
    expected = dict(zip(gradient.output_names, gradient.run(None, {"x": x})))
    module = TorchModule(model)
    given = torch.from_numpy(x).requires_grad_()
    total = module(given)
    total.backward()
    assert total.item() == pytest.approx(float(ReferenceEvaluator(model.to_bytes()).run(None, {"x": x})[0]))
    np.testing.assert_allclose(given.grad.numpy(), expected["x.grad"], rtol=1e-12)
    np.testing.assert_allclose(module.get_parameter("w").grad.numpy(), expected["w.grad"], rtol=1e-12)
    assert np.abs(expected["w.grad"]).sum() > 0  # the derivative of the bodies has none
    assert module.to_model().ir.functions.keys() == model.ir.functions.keys()
