"""Outlined parts of a graph: the results of the same operators in place, and one function for equal calls."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from archipel.bundle.graphs import inspect_graph
from archipel.graph.build import Builder
from archipel.graph.outline import Functions, outline


def affine(op: Builder, x: ir.Value, w: ir.Value, b: ir.Value | None) -> list[ir.Value]:
    product = op.MatMul(x, op.Mul(w, np.float32(2.0)))
    return [product if b is None else op.Add(product, b), op.ReduceSum(product, [0], keepdims=0)]


def build(functions: Functions | None) -> onnx.ModelProto:
    """Two calls with the same shapes, one with another, one without the optional input."""
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": 21})
    op = Builder(graph)
    kind = ir.DataType.FLOAT
    x, w, v = op.input("x", kind, ["n", 3]), op.input("w", kind, [3, 3]), op.input("v", kind, [3, 2])
    b = op.input("b", kind, [3])
    op.outlined = functions
    y, _ = outline(op, "Affine", [x, w, b], affine, scale=2)
    z, sums = outline(op, "Affine", [y, w, b], affine, scale=2)
    other, _ = outline(op, "Affine", [z, w, None], affine, scale=2)
    last, _ = outline(op, "Affine", [other, v, None], affine, scale=2)
    op.name_output(sums, "sums")
    op.name_output(last, "last")
    model = ir.Model(graph, ir_version=10)
    if functions is not None:
        functions.define(model)
    return ir.to_proto(model)


def test_functions_compute_what_the_operators_do() -> None:
    apart, inside = build(Functions()), build(None)
    onnx.checker.check_model(apart, full_check=True)
    inspect_graph("train", apart.SerializeToString(), ("weights.safetensors", 0))
    assert [node.op_type for node in apart.graph.node] == ["Affine"] * 4
    assert not inside.functions
    assert len({node.overload for node in apart.graph.node}) == len(apart.functions) == 3
    assert apart.graph.node[0].overload == apart.graph.node[1].overload
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 3), "w": (3, 3), "v": (3, 2), "b": (3,)}
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    results = []
    for model in (apart, inside):
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        results.append(session.run(["sums", "last"], feed))
    w, b = 2 * feed["w"].astype(np.float64), feed["b"]
    y = feed["x"] @ w + b
    want = [(y @ w).sum(0), (y @ w + b) @ w @ (2 * feed["v"])]
    for found in results:
        for have, expected in zip(found, want):
            np.testing.assert_allclose(have, expected, rtol=1e-5)


def test_functions_that_nobody_calls_are_not_written() -> None:
    graph = ir.Graph([], [], nodes=[], name="case", opset_imports={"": 21})
    op = Builder(graph)
    x = op.input("x", ir.DataType.FLOAT, [2])
    op.outlined = functions = Functions()
    (unused,) = outline(op, "Twice", [x], lambda op, x: [op.Add(x, x)])
    op.name_output(op.Neg(x), "y")
    graph.remove(unused.producer())
    model = ir.Model(graph, ir_version=10)
    functions.define(model)
    assert not model.functions
    assert set(model.opset_imports) == {""}
