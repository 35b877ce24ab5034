"""The pack's LSTM against PyTorch in float64, and against the loops of the functions' bodies."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from archipel.autodiff import differentiate
from archipel.graph.build import Builder
from archipel.graph.outline import Functions
from archipel.lite_runtime.engines.kernels import KernelPack
from tests.support.kernel_pack import open_session

# Steps, batch, features, hidden. Rows and columns that fill no block of the kernels, and a batch of several panels.
SIZES = [(4, 1, 3, 2), (3, 5, 2, 7), (2, 32, 4, 24), (2, 71, 5, 13)]


def model_of(features: int, hidden: int, direction: str, sequence: bool, of: str = "xwrbhc") -> bytes:
    """The gradients `of` an LSTM's inputs from those of its results, of Y as well or of the last states alone."""
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": 21})
    op = Builder(graph)
    ways = 2 if direction == "bidirectional" else 1
    shapes = {
        "x": ["steps", "batch", features], "w": [ways, 4 * hidden, features], "r": [ways, 4 * hidden, hidden],
        "b": [ways, 8 * hidden], "h": [ways, "batch", hidden], "c": [ways, "batch", hidden],
    }  # fmt: skip
    values = {name: op.input(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()}
    x, w, r, b, h, c = values.values()
    states = op.emit("LSTM", x, w, r, b, None, h, c, hidden_size=hidden, direction=direction, outputs=3)
    chosen = states if sequence else states[1:]
    cotangents = {y: op.input(f"g{i}", ir.DataType.FLOAT, list(y.shape)) for i, y in enumerate(chosen)}
    op.outlined = functions = Functions()
    gradients = differentiate(op, cotangents, [values[name] for name in of])
    for name, gradient in zip(of, gradients):
        op.name_output(gradient, f"d{name}")
    model = ir.Model(graph, ir_version=10)
    functions.define(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


def blocks(gates: torch.Tensor) -> torch.Tensor:
    """From ONNX's order of the gates i o f g to PyTorch's, i f g o."""
    i, o, f, g = gates.chunk(4)
    return torch.cat([i, f, g, o])


@pytest.mark.parametrize("sequence", [True, False], ids=["every state", "last states"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.sampled(every=6)
def test_gradients_are_pytorchs(direction: str, sequence: bool, pack: KernelPack) -> None:
    rng = np.random.default_rng(0)
    backwards = [False, True] if direction == "bidirectional" else [False]
    for steps, batch, features, hidden in SIZES:
        ways = len(backwards)
        shapes = {
            "x": (steps, batch, features), "w": (ways, 4 * hidden, features), "r": (ways, 4 * hidden, hidden),
            "b": (ways, 8 * hidden), "h": (ways, batch, hidden), "c": (ways, batch, hidden),
        }  # fmt: skip
        feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        x, w, r, b, h, c = leaves = [torch.from_numpy(each).double().requires_grad_() for each in feed.values()]
        runs = []
        for way, reverse in enumerate(backwards):
            layer = torch.nn.LSTM(features, hidden).double()
            names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            given = dict(zip(names, map(blocks, (w[way], r[way], *b[way].chunk(2)))))
            run = (x.flip(0) if reverse else x, (h[way : way + 1], c[way : way + 1]))
            y, ends = torch.func.functional_call(layer, given, run)
            runs.append((y.flip(0) if reverse else y, *ends))
        results = [torch.stack([y for y, _, _ in runs], 1)] if sequence else []
        results += [torch.cat(each) for each in list(zip(*runs))[1:]]
        seeds = [rng.standard_normal(each.shape).astype(np.float32) for each in results]
        torch.autograd.backward(results, [torch.from_numpy(each).double() for each in seeds])
        feed |= {f"g{i}": each for i, each in enumerate(seeds)}
        model = model_of(features, hidden, direction, sequence)
        for each in (pack, None):
            found = open_session(model, each).run([f"d{name}" for name in shapes], feed)
            for name, have, leaf in zip(shapes, found, leaves):
                want = leaf.grad.numpy()
                atol = 1e-5 * max(np.abs(want).max(), 1)
                np.testing.assert_allclose(have, want, atol=atol, err_msg=f"d{name} {steps, batch, hidden} {each}")


def test_large_arguments_saturate_and_no_number_stays_one(pack: KernelPack) -> None:
    feed = {name: np.zeros((1, 1, 1), np.float32) for name in ("h", "c", "g0", "g1")}
    weights = {"w": np.ones((1, 4, 1)), "r": np.zeros((1, 4, 1)), "b": np.zeros((1, 8))}
    feed |= {name: each.astype(np.float32) for name, each in weights.items()}
    feed["g1"] += 1
    runs = open_session(model_of(1, 1, "forward", False, of="w"), pack)  # without that of x
    for x in (1e4, -1e4):
        (found,) = runs.run(["dw"], feed | {"x": np.full((1, 1, 1), x, np.float32)})
        np.testing.assert_allclose(found, 0, atol=1e-30)
    (found,) = runs.run(["dw"], feed | {"x": np.full((1, 1, 1), np.nan, np.float32)})
    assert np.isnan(found).all()
