"""Traps in ONNX Runtime that the graphs keep clear of: microseconds of the way that is emitted, and of the plain one.

python benchmarks/traps.py [--quick] [--json]
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
from measure import Report, arguments, compare, interleave
from onnx import TensorProto, helper, numpy_helper

OURS = "as emitted"


def session(
    node: onnx.NodeProto, shape: tuple[int, ...], second: np.ndarray | None, threads: int
) -> ort.InferenceSession:
    """`node` reads x (float32, `shape`) and, where `second` is given, the constant c; it writes y."""
    graph = helper.make_graph(
        [node],
        "trap",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [] if second is None else [numpy_helper.from_array(second, "c")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("onnxruntime", "onnx"))
    one = np.full((1, 1, 1, 1), 0.5, np.float32)
    vector = np.ones(512, np.float32)
    mul, product = helper.make_node("Mul", ["x", "c"], ["y"]), helper.make_node("MatMul", ["x", "c"], ["y"])
    einsum = helper.make_node("Einsum", ["x"], ["y"], equation="abcd->abdc")
    transpose = helper.make_node("Transpose", ["x"], ["y"], perm=[0, 1, 3, 2])
    wide, inner, matrix = (1280, 320, 1, 1), (32, 64, 25, 5), (1024, 512)
    cases = {
        "a scalar as [1, 1, 1, 1]": ("rank 0", wide, (mul, one), (mul, one.reshape(())), 1),
        "inner matrices by Einsum": ("Transpose", inner, (einsum, None), (transpose, None), 1),
        "the same, two threads": ("Transpose", inner, (einsum, None), (transpose, None), 2),
        "one column in MatMul": ("rank 1", matrix, (product, vector[:, None]), (product, vector), 1),
    }
    for case, (plain_name, shape, emitted, plain, threads) in cases.items():
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        runs = {
            name: partial(session(node, shape, second, threads).run, None, {"x": x})
            for name, (node, second) in ((OURS, emitted), (plain_name, plain))
        }
        times = interleave(runs, 0.3 if options.quick else 2.0)
        report.add(compare("traps", case, OURS, {name: [1e3 * t for t in each] for name, each in times.items()}, "us"))


if __name__ == "__main__":
    main()
