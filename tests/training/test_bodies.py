"""Options of a step with models that have a loop or a branch: the losses are those of the plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from archipel import Model, training
from archipel.errors import TrainingError
from archipel.training import losses, optimizers
from tests.support.voice_activity import voice_activity

RNG = np.random.default_rng(0)
LOOP = """<ir_version: 8, opset_import: ["" : 17]>
net (float[batch, 3] x) => (float[batch, 4] y) <int64 most = {4}> {
    start = MatMul (x, enter)
    last, steps = Loop (most, , start) <body = b (int64 i, bool c, float[batch, 4] h)
        => (bool more, float[batch, 4] next, float[batch, 4] out) {
        a = MatMul (h, again)  next = Tanh (a)  out = Identity (next)  more = Identity (c)
    }>
    axis = Constant <value = int64[1] {0}> ()
    y = ReduceSum <keepdims = 0> (steps, axis)
}"""


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def network(kind: str, folder: Path) -> tuple[Model, list[tuple[np.ndarray, np.ndarray]]]:
    path = folder / "m.onnx"
    if kind == "If":
        path.write_bytes(voice_activity().SerializeToString())
        model = Model.from_onnx(path).fix({"rate": 16000, "state": 0.0})
        return model, [(floats(4, 20), floats(4, 1)) for _ in range(4)]
    proto = onnx.parser.parse_model(LOOP)
    for name, shape in (("enter", (3, 4)), ("again", (4, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(0.5 * floats(*shape), name))
    path.write_bytes(proto.SerializeToString())
    return Model.from_onnx(path), [(floats(4, 3), floats(4, 4)) for _ in range(4)]


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "four steps in a graph": ({"steps": 4}, 1e-6),
    "example by example, a bound that nothing reaches": ({"per_example": training.per_example(clip=1e6)}, 1e-5),
    "mixed precision": ({"precision": "mixed"}, 1e-3),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", [pytest.param("If", marks=pytest.mark.slow), "Loop"])
def test_options_of_a_step(kind: str, tmp_path: Path) -> None:
    model, batches = network(kind, tmp_path)
    plain = training.step_graph(model, losses.mse(), optimizers.sgd())
    assert kind in {node.op_type for node in plain.ir.graph.all_nodes()}
    expected = training.run_steps(plain, batches, {"lr": 0.1})
    assert len({f"{loss:.4f}" for loss in expected}) == 4
    for options, tolerance in OPTIONS.values():
        step = training.step_graph(model, losses.mse(), optimizers.sgd(), **options)
        np.testing.assert_allclose(training.run_steps(step, batches, {"lr": 0.1}), expected, rtol=tolerance)


def test_layers_inside_a_loop_keep_their_statistics(tmp_path: Path) -> None:
    """BatchNormalization and Dropout inside are refused where they would have to learn or draw, and run else."""
    text = LOOP.replace("next = Tanh (a)", "d = Dropout (a)  n = BatchNormalization (d, s, z, z, s)  next = Tanh (n)")
    proto = onnx.parser.parse_model(text)
    for name, array in (
        ("enter", floats(3, 4)), ("again", floats(4, 4)), ("s", np.ones(4, np.float32)), ("z", np.zeros(4, np.float32))
    ):  # fmt: skip
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    model = Model.from_onnx(path)
    # Equal tensors that the exporter merged are apart again, in a body as well.
    norm = next(n for n in model.ir.graph.all_nodes() if n.op_type == "BatchNormalization")
    assert len({value.name for value in norm.inputs if value is not None}) == 5
    with pytest.raises(TrainingError, match=r"inside a loop or branch.*batch_norm='frozen'"):
        training.step_graph(model, losses.mse(), optimizers.sgd(), dropout=False)
    with pytest.raises(TrainingError, match=r"Dropout .* is inside a loop or branch.*dropout=False"):
        training.step_graph(model, losses.mse(), optimizers.sgd(), batch_norm="frozen")
    step = training.step_graph(model, losses.mse(), optimizers.sgd(), batch_norm="frozen", dropout=False)
    batches = [(floats(4, 3), floats(4, 4))] * 6
    found = training.run_steps(step, batches, {"lr": 0.05})
    assert found[-1] < found[0]
