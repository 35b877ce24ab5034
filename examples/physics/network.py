"""The network, its derivatives in x and t, and the graph whose mean square is the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from problems import Points, Problem

from archipel import Model, autodiff
from archipel.graph import Builder
from archipel.graph.passes import optimize

WIDTHS = (2, 20, 20, 20, 20, 1)


def weights(widths: Sequence[int] = WIDTHS, seed: int = 0) -> dict[str, np.ndarray]:
    """Glorot's normal initialization: matrices w0, w1, ... [in, out] and biases b0, b1, ... of zeros."""
    rng, made = np.random.default_rng(seed), {}
    for i, (before, after) in enumerate(pairwise(widths)):
        deviation = np.sqrt(2 / (before + after))
        made[f"w{i}"] = (deviation * rng.standard_normal((before, after))).astype(np.float32)
        made[f"b{i}"] = np.zeros(after, np.float32)
    return made


def network(values: dict[str, np.ndarray], size: int | str = "n") -> Model:
    """ "x" [size, 2] of (x, t) -> "u" [size, 1], with tanh between the layers."""
    graph = ir.Graph([], [], nodes=[], name="network", opset_imports={"": 21})
    op = Builder(graph)
    h = op.input("x", ir.DataType.FLOAT, [size, 2])
    layers = len(values) // 2
    for i in range(layers):
        h = op.Gemm(h, op.initializer(f"w{i}", values[f"w{i}"]), op.initializer(f"b{i}", values[f"b{i}"]))
        h = op.Tanh(h) if i < layers - 1 else h
    op.name_output(h, "u")
    model = Model(ir.Model(graph, ir_version=10))
    return Model.from_proto(ir.to_proto(model.ir), parameters=list(values))


def with_derivatives(model: Model) -> Model:
    """The network with u_x, u_xx and u_t: three times forward mode, one along a tangent that x moves along."""
    pushed = autodiff.jvp(model, of=["u"], wrt=["x"])
    pushed = autodiff.jvp(pushed, of=["u.tangent"], wrt=["x"])
    pushed = autodiff.jvp(pushed, of=["u"], wrt=["x"])
    op = Builder(pushed.ir.graph)
    ports = {port.name: port for port in (*pushed.ir.graph.inputs, *pushed.ir.graph.outputs)}
    suffix = ""
    for direction, derivative in (((1, 0), "u_x"), ((1, 0), "u_xx"), ((0, 1), "u_t")):
        suffix += ".tangent"
        tangent = ports[f"x{suffix}"]
        with op.before(next(iter(pushed.ir.graph))):
            along = op.expand_like(op.constant(np.array([direction], np.float32)), ports["x"])
        tangent.replace_all_uses_with(along)
        pushed.ir.graph.inputs.remove(tangent)
        ports[f"u{suffix}"].name = derivative
    optimize(pushed.ir)  # the first two tangents are one now
    return pushed


def equation(model: Model, problem: Problem, points: Points) -> tuple[Model, np.ndarray, np.ndarray]:
    """The graph to train, its input and its labels: the mean square of their difference is the loss.

    That is the mean square of the residual inside plus the mean square of u's error at the edge, so each part is scaled
    with the root of how much rarer its points are.
    """
    inside, edge = len(points.interior), len(points.edge)
    full = with_derivatives(model)
    graph = full.ir.graph
    op = Builder(graph)
    u, u_x, u_xx, u_t = (next(v for v in graph.outputs if v.name == n) for n in ("u", "u_x", "u_xx", "u_t"))
    inner = [op.Slice(v, [0], [inside], [0]) for v in (u, u_x, u_t, u_xx)]
    scale = [float(np.sqrt((inside + edge) / part)) for part in (inside, edge)]
    residual = op.Mul(problem.residual(op, *inner), scale[0])
    error = op.Mul(op.Slice(u, [inside], [inside + edge], [0]), scale[1])
    while graph.outputs:
        graph.outputs.pop()
    op.name_output(op.Concat(residual, error, axis=0), "misfit")
    labels = np.concatenate([np.zeros((inside, 1), np.float32), np.float32(scale[1]) * points.values])
    model = Model.from_proto(ir.to_proto(full.ir), parameters=model.parameter_names)
    return model, np.concatenate([points.interior, points.edge]), labels
