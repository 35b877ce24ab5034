"""Nothing is emitted that ONNX Runtime's CPU build does not run: every rule, every step graph, node by node."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kernels import without_kernel
from test_rules import OWN
from test_training import TASKS

from archipel import Model, training
from archipel.autodiff import vjp
from archipel.graph import check_model

# MaxPool runs in float64, but nothing that its gradient could be made of does: Conv, AveragePool, Resize.
FLOAT32_ONLY = {("", "MaxPool")}


@pytest.mark.parametrize("key", OWN, ids=lambda key: key[1])
@pytest.mark.sampled(every=12)
def test_rules_emit_standard_operators(key: tuple[str, str], gradient_cases: dict) -> None:
    @settings(
        max_examples=5,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(gradient_cases[key])
        single = case.single or key in FLOAT32_ONLY
        for dtype in (np.float32,) if single else (np.float32, np.float64):
            forward = Model.from_proto(case.model(dtype))
            if dtype == np.float64 and without_kernel(forward.ir):
                continue  # the operator itself does not run
            model = vjp(forward, of=case.targets, wrt=[case.names[i] for i in case.wrt])
            check_model(model.ir)
            assert without_kernel(model.ir) == []

    check()


FAST = ("MLP",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(TASKS)]
)
@pytest.mark.sampled(every=4)
def test_steps_are_standard_operators(name: str) -> None:
    task = TASKS[name]
    model = Model.from_torch(task.network().train(), torch.from_numpy(task.batch(0)[0]))
    for optimizer in (training.optimizers.sgd(momentum=0.9), training.optimizers.adam()):
        for steps in (1, 3):
            step = training.step_graph(model, task.loss(), optimizer, steps=steps)
            check_model(step.ir)
            assert without_kernel(step.ir) == []


def test_a_missing_kernel_is_found() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    agraph (double[2] x, bool c) => (double[2] y) {
        y = If (c) <then_branch = t () => (double[2] a) { a = Erf (x) },
                    else_branch = e () => (double[2] b) { b = Neg (x) }>
    }"""
    model = Model.from_proto(onnx.parser.parse_model(text))
    assert without_kernel(model.ir) == ["Erf(DOUBLE)"]
