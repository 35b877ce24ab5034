"""Bytes alive together, counted by hand, and the order in which ONNX Runtime runs nodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.graph.liveness import execution_order, finish_early, peak_bytes
from archipel.graph.sizes import Sizes

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def test_a_view_keeps_what_it_is_a_view_of() -> None:
    model = ir.from_onnx_text(
        HEAD
        + """f (float[4] x, int64[2] s) => (float[2, 2] y) <float[4] h, float[2, 2] v, float[4] a, float[2, 2] b> {
        h = Exp (x)  v = Reshape (h, s)  a = Neg (x)  b = Reshape (a, s)  y = Add (v, b)
    }"""
    )
    sizes = Sizes(model, 1)
    assert peak_bytes(list(model.graph), sizes.nbytes, model.graph.outputs) == 32  # h and a, 16 each


def test_what_a_body_needs_counts_while_it_runs() -> None:
    model = ir.from_onnx_text(
        HEAD
        + """f (float[4] x, bool c) => (float[4] y) <float[4] h> {
        h = Exp (x)
        r = If (c) <then_branch = t () => (float[4] p) <float[4] q> { q = Exp (h)  p = Neg (q) },
                    else_branch = e () => (float[4] z) { z = Neg (h) }>
        y = Neg (r)
    }"""
    )
    model.graph[1].outputs[0].type, model.graph[1].outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([4])
    sizes = Sizes(model, 1)
    order = list(model.graph)
    assert peak_bytes(order, sizes.nbytes, model.graph.outputs) == 48  # h, r and inside q
    assert peak_bytes(order, sizes.nbytes, model.graph.outputs, inner=False) == 32


def test_nodes_run_in_the_order_of_onnx_runtime(tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        HEAD
        + """f (float[4] x) => (float[4] y, float[4] z) {
        [a] a = Exp (x)  [b] b = Neg (x)  [y] y = Add (b, a)  [c] c = Sin (b)  [z] z = Mul (a, c)
    }"""
    )
    for early in (False, True):
        if early:
            finish_early(model.graph, model.graph.outputs)
            assert [node.name for node in model.graph] == ["a", "b", "c", "z", "y"]
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "run")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        proto = ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        session.run(None, {"x": np.ones(4, np.float32)})
        events = json.loads(Path(session.end_profiling()).read_text())
        ran = [event["name"].removesuffix("_kernel_time") for event in events if event.get("cat") == "Node"]
        assert ran == [node.name for node in execution_order(model.graph)]
