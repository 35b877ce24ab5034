"""Model-local functions with a gradient rule: every program uses the rule, or the body, and has neither left over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from archipel import Model, autodiff, training
from archipel.autodiff import RULES, RuleContext
from archipel.compression import StaticInt8, compress
from archipel.compression.deploy import deploy
from archipel.converter.lowering import predict_program
from archipel.errors import AutodiffError
from archipel.graph import check_model
from archipel.graph.functions import KEPT

STEPPED = """<ir_version: 10, opset_import: ["" : 21, "test.programs" : 1]>
agraph (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, -2, 0.5, 3}>
{
    p = MatMul (x, w)
    y = test.programs.Stepped (p)
}
<opset_import: ["" : 21], domain: "test.programs"> Stepped (a) => (b) { b = Floor (a) }"""
X = np.array([[0.3, 1.1], [-0.4, 0.9], [2.0, 0.2]], np.float32)
W = np.array([[1, -2], [0.5, 3]], np.float32)


def load() -> Model:
    return Model.from_proto(onnx.parser.parse_model(STEPPED))


@pytest.fixture
def rule() -> Iterator[None]:
    @autodiff.rule("test.programs", "Stepped")
    def straight_through(ctx: RuleContext) -> list[ir.Value | None]:
        return [ctx.cotangent]

    yield
    RULES.pop(("test.programs", "Stepped"), None)
    KEPT.discard(("test.programs", "Stepped"))


@pytest.mark.usefixtures("rule")
def test_programs_have_no_functions() -> None:
    model = load()
    assert model.ir.functions
    loss = training.losses.cross_entropy()
    step = training.step_graph(model, loss, training.optimizers.sgd())
    predict = predict_program(deploy(model).predict)
    quantized = compress(model, [StaticInt8(examples=3)], calibration=X)[0].deployed()
    for program in (step, training.evaluate_graph(model, loss), predict, quantized):
        check_model(program.ir)
        assert not program.ir.functions
    session = onnxruntime.InferenceSession(predict.to_bytes(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["y"], {"x": X})[0], np.floor(X @ W))
    # Through Floor itself no gradient passes; through the rule the loss goes down.
    losses = training.run_steps(step, [(X, np.array([0, 1, 0]))] * 20, hyperparameters={"lr": 0.5})
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.usefixtures("rule")
def test_step_of_a_model_loaded_before_the_rule() -> None:
    kept = KEPT.copy()
    KEPT.clear()
    early = load()
    KEPT.update(kept)
    with pytest.raises(
        AutodiffError, match=r"Stepped was registered after the model was loaded, .*load the model again"
    ):
        training.step_graph(early, training.losses.cross_entropy(), training.optimizers.sgd())
