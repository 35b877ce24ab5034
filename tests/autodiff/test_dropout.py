"""Dropout while training, where each runtime draws random numbers of its own: against the mask of the same run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
from gradient_cases.case import Case
from gradient_cases.reference import evaluator

from archipel import Model
from archipel.autodiff import vjp

DATA = 1.0 + np.random.default_rng(0).random((40, 30))
COTANGENT = np.random.default_rng(1).standard_normal(DATA.shape)

Run = Callable[[bytes, list[str], dict[str, np.ndarray]], list[np.ndarray]]


def runtime(model: bytes, outputs: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    taken = {port.name for port in session.get_inputs()}
    found: list[np.ndarray] = session.run(outputs, {name: value for name, value in feed.items() if name in taken})
    return found


def reference(model: bytes, outputs: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(evaluator(model).run(outputs, feed))


@pytest.mark.parametrize("run", [runtime, reference], ids=["onnxruntime", "reference"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("fixed", [True, False], ids=["constants", "at run time"])
@pytest.mark.sampled(every=6)
def test_gradient_passes_where_nothing_was_dropped(run: Run, outputs: int, ratio: float, fixed: bool) -> None:
    # The seed keeps the reference to one mask; ONNX Runtime's is the one of its run either way.
    case = Case(
        "Dropout",
        [DATA, np.asarray(ratio), np.asarray(True)],
        {"seed": 3},
        constants=frozenset({1, 2} if fixed else ()),
        outputs=outputs,
        free={0: {0}},
    )
    names = [case.names[i] for i in case.wrt]
    model = vjp(Model.from_proto(case.model(np.float32)), of=["y"], wrt=names)
    feed = {**case.arrays(np.float32), "y.cotangent": COTANGENT.astype(np.float32)}
    y, *gradients = run(model.to_bytes(), ["y", *(f"{name}.grad" for name in names)], feed)
    # The data has no zeros.
    dropped = y == 0
    assert abs(dropped.mean() - ratio) < 0.06
    np.testing.assert_allclose(gradients[0], np.where(dropped, 0, COTANGENT / (1 - ratio)), rtol=1e-5)
    if not fixed:
        np.testing.assert_allclose(gradients[1], np.sum(COTANGENT * y) / (1 - ratio), rtol=1e-3)


def test_mask_of_a_run_is_the_mask_of_its_gradient() -> None:
    case = Case("Dropout", [DATA, None, np.asarray(True)], constants=frozenset({2}), outputs=2)
    proto = case.model(np.float32)
    proto.graph.output.add().name = "y1"
    proto.graph.output[1].type.tensor_type.elem_type = 9
    for size in DATA.shape:
        proto.graph.output[1].type.tensor_type.shape.dim.add().dim_value = size
    model = vjp(Model.from_proto(proto), of=["y"], wrt=["x0"])
    feed = {**case.arrays(np.float32), "y.cotangent": COTANGENT.astype(np.float32)}
    mask, gradient = runtime(model.to_bytes(), ["y1", "x0.grad"], feed)
    assert abs(mask.mean() - 0.5) < 0.06
    np.testing.assert_allclose(gradient, mask * COTANGENT * 2, rtol=1e-5)
