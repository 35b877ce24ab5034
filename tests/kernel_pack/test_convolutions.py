"""The pack's operators against PyTorch in float64, and against the standard operators of the functions' bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch.nn import functional

from archipel.autodiff import differentiate
from archipel.bundle.graphs.operators import KERNELS_DOMAIN
from archipel.graph.build import Builder
from archipel.graph.outline import Functions
from archipel.graph.passes.dead_code import remove_dead_code
from archipel.lite_runtime.engines.kernels import KernelPack
from tests.support.kernel_pack import open_session

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3 x 3, a batch that two threads cannot share evenly": ((5, 3, 9, 8), (4, 3, 3, 3), {"padding": 1}),
    "stride 2, a row and a column that no window reaches": ((4, 3, 10, 8), (4, 3, 3, 3), {"stride": 2}),
    "dilated": ((4, 2, 9, 9), (3, 2, 3, 2), {"dilation": (2, 3), "padding": (2, 0)}),
    "groups": ((4, 6, 7, 5), (4, 3, 3, 3), {"groups": 2, "padding": 1}),
    "depthwise, stride 2": ((3, 5, 8, 7), (5, 1, 3, 3), {"groups": 5, "padding": 1, "stride": 2}),
    "depthwise, short rows": ((2, 4, 12, 3), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "depthwise, many channels, 5 x 3 of two dilations": (
        (2, 40, 7, 9),
        (40, 1, 5, 3),
        {"groups": 40, "padding": (4, 3), "dilation": (2, 3)},
    ),
    "depthwise, one row more than before": ((3, 20, 6, 5), (20, 1, 2, 3), {"groups": 20, "padding": (1, 1)}),
    "depthwise, narrower output": ((2, 3, 20, 19), (3, 1, 3, 3), {"groups": 3, "dilation": 2}),
    "depthwise, stride 3 with rows that no window reaches": ((2, 3, 9, 10), (3, 1, 2, 1), {"groups": 3, "stride": 3}),
    "depthwise, more kernel than stride": (
        (2, 3, 11, 12),
        (3, 1, 5, 4),
        {"groups": 3, "stride": (2, 3), "padding": (3, 2), "dilation": (1, 2)},
    ),
    "1 x 1": ((4, 20, 4, 4), (9, 20, 1, 1), {}),
    "1 x 1, stride 2": ((4, 6, 5, 5), (8, 6, 1, 1), {"stride": 2}),
    "5 x 5, one example": ((1, 2, 9, 9), (3, 2, 5, 5), {"padding": 2}),
}


def pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, tuple) else [value] * 2


def model_of(x: tuple[int, ...], w: tuple[int, ...], options: dict[str, Any], bias: bool, batch: int | str) -> bytes:
    """y, dx, dw, db of a convolution with cotangent g, as functions of the pack's domain."""
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": 21})
    op = Builder(graph)
    kind = ir.DataType.FLOAT
    values = [op.input("x", kind, [batch, *x[1:]]), op.input("w", kind, w)]
    values += [op.input("b", kind, w[:1])] if bias else []
    y = op.Conv(
        *values, strides=pair(options.get("stride", 1)), dilations=pair(options.get("dilation", 1)),
        pads=pair(options.get("padding", 0)) * 2, group=options.get("groups", 1),
    )  # fmt: skip
    op.name_output(y, "y")
    g = op.input("g", kind, [batch, *list(y.shape)[1:]])
    op.outlined = functions = Functions()
    for value, gradient in zip(values, differentiate(op, {y: g}, values)):
        op.name_output(gradient, f"d{value.name}")
    model = ir.Model(graph, ir_version=10)
    remove_dead_code(model)  # the Conv that the outlined one replaces
    functions.define(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto.SerializeToString()


@pytest.mark.sampled(every=32)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_pytorchs(case: str, bias: bool, pack: KernelPack) -> None:
    x_shape, w_shape, options = CASES[case]
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal(x_shape), "w": rng.standard_normal(w_shape)}
    if bias:
        arrays["b"] = rng.standard_normal(w_shape[:1])
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in arrays.items()}
    y = functional.conv2d(*tensors.values(), **options)
    arrays["g"] = rng.standard_normal(y.shape)
    y.backward(torch.from_numpy(arrays["g"]))
    expected = {"y": y.detach(), **{f"d{name}": tensor.grad for name, tensor in tensors.items()}}
    # A symbolic batch: the kernels see its size when they run, and again when it changes.
    model = model_of(x_shape, w_shape, options, bias, "batch")
    for each in (pack, None):
        runs = open_session(model, each)
        found = runs.run(list(expected), {name: array.astype(np.float32) for name, array in arrays.items()})
        for (name, want), have in zip(expected.items(), found):
            scale = want.abs().max().item()
            np.testing.assert_allclose(have, want, atol=1e-5 * max(scale, 1), err_msg=f"{name}, {each}")
        half = {name: array.astype(np.float32)[: 1 if name in "xg" else None] for name, array in arrays.items()}
        (one,) = runs.run(["y"], half)
        np.testing.assert_allclose(one, expected["y"][:1], atol=1e-5 * expected["y"].abs().max().item())


def test_the_pack_runs_what_the_functions_stand_for(pack: KernelPack, tmp_path: Any) -> None:
    x, w, options = CASES["groups"]
    model = model_of(x, w, options, True, 4)
    kinds = []
    for each in (pack, None):
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        if each is not None:
            each.register(settings, 1)
        ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
        kinds.append(sorted(node.op_type for node in nodes if node.domain == KERNELS_DOMAIN))
    assert kinds == [["Conv", "ConvGradInput", "ConvGradWeight"], []]
