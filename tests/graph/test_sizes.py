"""Sizes in numbers where a graph says them in symbols."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.sizes import Sizes


def test_iterations_of_loops() -> None:
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 21]>
    f (float[t, 2] a, float[2, 5] b, float[2] x) => (float[2] y, float[2] z) <int64 below = {-1}, bool go = {1}> {
        y = Scan <num_scan_inputs = 2, scan_input_axes = [0, 1],
            body = step (float[2] s, float[2] r, float[2] c) => (float[2] u) { v = Add (r, c)  u = Add (s, v) }
        > (x, a, b)
        z = Loop (below, go, x) <body = again (int64 i, bool on, float[2] s) => (bool still, float[2] u) {
            still = Identity (on)  u = Neg (s)
        }>
    }""")
    scan, loop = model.graph
    sizes = Sizes(model, 7)
    assert sizes.iterations(scan) == 5  # the number in the file, where the other sequence has a symbol
    assert sizes.iterations(loop) == 0
