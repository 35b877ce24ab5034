"""The pack's normalization against PyTorch in float64, and against the standard operators of the functions' bodies."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

from archipel.autodiff.rules.normalization import backward, normalize_batch
from archipel.graph.build import Builder
from archipel.graph.outline import Functions
from archipel.lite_runtime.engines.kernels import KernelPack
from tests.support.kernel_pack import open_session

EPSILON = 1e-3
SHAPES = [(4, 3, 5, 7), (2, 20, 4, 4), (3, 9, 2, 1), (6, 17), (2, 2, 3, 4, 5), (1, 1, 33)]


def model_of(shape: tuple[int, ...]) -> bytes:
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": 21})
    op = Builder(graph)
    op.outlined = functions = Functions()
    kind, batch = ir.DataType.FLOAT, ["batch", *shape[1:]]
    x, g = op.input("x", kind, batch), op.input("g", kind, batch)
    scale, bias = op.input("scale", kind, shape[1:2]), op.input("bias", kind, shape[1:2])
    y, statistics = normalize_batch(op, x, scale, bias, EPSILON)
    results = [y, statistics.mean, statistics.var, *backward(op, x, g, statistics, scale)]
    for name, result in zip(("y", "mean", "var", "dx", "dscale", "dbias"), results):
        op.name_output(result, name)
    model = ir.Model(graph, ir_version=10)
    functions.define(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


@pytest.mark.parametrize("mean", [0.3, 300.0], ids=["small mean", "large mean"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_pytorchs(shape: tuple[int, ...], mean: float, pack: KernelPack) -> None:
    rng = np.random.default_rng(0)
    # The numbers that float32 has, or the rounding of a large mean would count as an error of the variance.
    x = (rng.standard_normal(shape) + mean).astype(np.float32).astype(np.float64)
    g = rng.standard_normal(shape)
    scale, bias = rng.standard_normal(shape[1]), rng.standard_normal(shape[1])
    tensors = [torch.from_numpy(each).requires_grad_() for each in (x, scale, bias)]
    y = functional.batch_norm(tensors[0], None, None, *tensors[1:], training=True, eps=EPSILON)
    y.backward(torch.from_numpy(g))
    axes, count = (0, *range(2, len(shape))), x.size / shape[1]
    want = {
        "y": y.detach().numpy(), "mean": x.mean(axes), "var": x.var(axes), "dx": tensors[0].grad.numpy(),
        "dscale": tensors[1].grad.numpy() / count, "dbias": tensors[2].grad.numpy() / count,
    }  # fmt: skip
    feed = {"x": x, "g": g, "scale": scale, "bias": bias}
    model = model_of(shape)
    # The standard operators lose the digits that a large mean takes; the kernels do not.
    for each in (pack, None) if mean < 1 else (pack,):
        runs = open_session(model, each)
        found = runs.run(list(want), {name: array.astype(np.float32) for name, array in feed.items()})
        for (name, expected), have in zip(want.items(), found):
            atol = 1e-5 * max(np.abs(expected).max(), 1) if mean < 1 else 2e-4 * max(np.abs(expected).max(), 1)
            np.testing.assert_allclose(have, expected, atol=atol, err_msg=f"{name}, {each}")
